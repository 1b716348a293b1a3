# SPDX-License-Identifier: BSD-3-Clause
"""Give a role spare hosts, in role metadata: ``{"monarch": {"spares": 1}}``.

The key is that of ``model.sidecars``. Other schedulers ignore it: without spares the role is a role of its world alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchx_monarch.model.sidecars import KEY, HasMetadata

SPARES = "spares"


class SparesError(ValueError):
    """Raised when a role's number of spare hosts is invalid, or its command cannot have spare hosts."""


def read_spares(role: HasMetadata) -> int | None:
    """Return the number of spare hosts that a role's metadata asks for; None if it does not say.

    Raises:
        SparesError: it is no number, 0 or more.
    """
    ours = role.metadata.get(KEY)
    spares = ours.get(SPARES) if isinstance(ours, Mapping) else None
    if spares is not None and (not isinstance(spares, int) or isinstance(spares, bool) or spares < 0):
        raise SparesError(f"role {role.name!r}: the spares of its metadata {KEY!r} are {spares!r}; use 0 or more")
    return spares
