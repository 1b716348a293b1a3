# SPDX-License-Identifier: BSD-3-Clause
"""What the metadata of a role says: that it is a sidecar, and how many spare hosts it has.

A role is a ``torchx.specs.Role``, which this package does not import.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEY = "monarch"
_SIDECAR = "sidecar"

SPARES = "spares"


class SidecarError(ValueError):
    """Raised when the sidecar mark of a role is not a boolean."""


def mark_sidecar(role: Any) -> None:
    """Mark a role as a sidecar, in place; keep a mark that the user has set."""
    ours = role.metadata.get(KEY)
    role.metadata[KEY] = {_SIDECAR: True, **(ours if isinstance(ours, Mapping) else {})}


def is_sidecar(role: Any) -> bool:
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


class SparesError(ValueError):
    """Raised when a role's number of spare hosts is invalid, or its command cannot have spare hosts."""


def read_spares(role: Any) -> int | None:
    """Return the number of spare hosts that a role's metadata asks for; None if it does not say.

    Raises:
        SparesError: it is no number, 0 or more.
    """
    ours = role.metadata.get(KEY)
    spares = ours.get(SPARES) if isinstance(ours, Mapping) else None
    if spares is not None and (not isinstance(spares, int) or isinstance(spares, bool) or spares < 0):
        raise SparesError(f"role {role.name!r}: the spares of its metadata {KEY!r} are {spares!r}; use 0 or more")
    return spares
