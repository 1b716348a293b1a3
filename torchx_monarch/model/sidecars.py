# SPDX-License-Identifier: BSD-3-Clause
"""Mark sidecar roles, which end with the rest of their app, in role metadata: ``{"monarch": {"sidecar": True}}``.

TorchX stores settings of one scheduler under a key of ``Role.metadata``, such as ``kubernetes`` for the pod overlay of
``torchx.schedulers.kubernetes_scheduler``. The key of this package is ``monarch``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

KEY = "monarch"
_SIDECAR = "sidecar"


class SidecarError(ValueError):
    """Raised when the sidecar mark of a role is not a boolean."""


class HasMetadata(Protocol):
    """The interface of ``torchx.specs.Role``, which this module does not import."""

    name: str
    metadata: dict[str, Any]


def mark(role: HasMetadata) -> None:
    """Mark a role as a sidecar, in place; keep a mark that the user has set."""
    ours = role.metadata.get(KEY)
    role.metadata[KEY] = {_SIDECAR: True, **(ours if isinstance(ours, Mapping) else {})}


def is_sidecar(role: HasMetadata) -> bool:
    """Return whether a role is marked as a sidecar.

    Raises:
        SidecarError: the mark is not a boolean.
    """
    ours = role.metadata.get(KEY, {})
    marked = ours.get(_SIDECAR, False) if isinstance(ours, Mapping) else ours
    if not isinstance(marked, bool):
        raise SidecarError(
            f"role {role.name!r}: its metadata {KEY!r} is {ours!r}; allowed is {{{_SIDECAR!r}: True}} or "
            f"{{{_SIDECAR!r}: False}}, which says whether the role is ended when all others have succeeded"
        )
    return marked
