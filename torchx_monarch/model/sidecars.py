# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Marks roles that end with the rest of their app, by role metadata: ``{"monarch": {"sidecar": True}}``.

TorchX keeps what is a scheduler's own under a key of ``Role.metadata``, such as ``kubernetes`` for the pod overlay of
``torchx.schedulers.kubernetes_scheduler``; this is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

_KEY = "monarch"
_SIDECAR = "sidecar"


class SidecarError(ValueError):
    """The metadata of a role does not say whether it is a sidecar."""


class HasMetadata(Protocol):
    """A ``torchx.specs.Role``, which this module does not import."""

    name: str
    metadata: dict[str, Any]


def mark(role: HasMetadata) -> None:
    """Mark a role as a sidecar, in place; a mark of the user's own stays."""
    ours = role.metadata.get(_KEY)
    role.metadata[_KEY] = {_SIDECAR: True, **(ours if isinstance(ours, Mapping) else {})}


def is_sidecar(role: HasMetadata) -> bool:
    """Whether a role is marked.

    Raises:
        SidecarError: the mark is neither true nor false.
    """
    ours = role.metadata.get(_KEY, {})
    marked = ours.get(_SIDECAR, False) if isinstance(ours, Mapping) else ours
    if not isinstance(marked, bool):
        raise SidecarError(
            f"role {role.name!r}: its metadata {_KEY!r} is {ours!r}; allowed is {{{_SIDECAR!r}: True}} or "
            f"{{{_SIDECAR!r}: False}}, which says whether the role is ended when all others have succeeded"
        )
    return marked
