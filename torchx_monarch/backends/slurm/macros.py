# SPDX-License-Identifier: BSD-3-Clause
"""Substitute TorchX's macros on the nodes, and name the nodes of the replicas 0."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from string import Template

RANK0_HOST = "TORCHX_RANK0_HOST"
"""Variable with the node of the first role's replica 0, set for every replica (TorchX's macro ``rank0_env``)."""


def nodes_variable(role: int) -> str:
    """Return the name of the variable with the node list of the role of this index, set for every task."""
    return f"MONARCH_NODES_{role}"


def first_node(nodes: str) -> str:
    """Return the first name of a node list: ``n08`` of ``n[08-11,20],m1``. (Running scontrol would delay the start.)"""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None
    return re.sub(r"\[([^\]\-,]*)[^\]]*\]", r"\1", first[0])


def substitute(
    command: Sequence[str], env: Mapping[str, str], image: str, app_id: str, replica: int
) -> tuple[list[str], dict[str, str]]:
    """Substitute TorchX's macros as ``torchx.specs.macros.Values`` does, and return command and environment."""
    values = {"img_root": image, "app_id": app_id, "replica_id": str(replica), "rank0_env": RANK0_HOST}

    def fill(text: str) -> str:
        return Template(text).safe_substitute(values)

    # TorchX does not substitute macros in the entrypoint.
    return [command[0], *map(fill, command[1:])], {name: fill(value) for name, value in env.items()}
