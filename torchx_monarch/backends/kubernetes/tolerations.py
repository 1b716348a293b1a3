# SPDX-License-Identifier: BSD-3-Clause
"""Parse tolerations that are spelled as ``kubectl taint`` spells the taints of nodes: ``KEY=VALUE:EFFECT``."""

from __future__ import annotations

import re

from torchx_monarch.backends.kubernetes.request import Object

EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")

_TAINT = re.compile(r"(?P<key>[^=:\s]+)(=(?P<value>[^=:\s]*))?(:(?P<effect>\w+))?")


def parse(taint: str) -> Object:
    """Return the toleration of a pod that tolerates a taint.

    Args:
        taint: ``KEY=VALUE:EFFECT``. Without ``=VALUE`` it stands for all values of the key, without ``:EFFECT`` for all
            effects.

    Raises:
        ValueError: the text is no taint, or the effect does not exist.
    """
    found = _TAINT.fullmatch(taint)
    if found is None:
        raise ValueError(f"{taint!r} is not of the form KEY=VALUE:EFFECT, KEY:EFFECT, KEY=VALUE or KEY")
    toleration: Object = {"key": found["key"], "operator": "Exists"}
    if found["value"] is not None:
        toleration |= {"operator": "Equal", "value": found["value"]}
    if found["effect"] is not None:
        if found["effect"] not in EFFECTS:
            raise ValueError(f"{taint!r} has the effect {found['effect']!r}; effects are {', '.join(EFFECTS)}")
        toleration["effect"] = found["effect"]
    return toleration
