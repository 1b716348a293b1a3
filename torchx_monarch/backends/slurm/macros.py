# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What only a task on its node can fill in: TorchX's macros, and where the replicas 0 are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from string import Template

RANK0_HOST = "TORCHX_RANK0_HOST"
"""The variable in which every replica finds the node of the first role's replica 0 (TorchX's macro rank0_env)."""


def nodes_variable(role: int) -> str:
    """The variable in which every task finds the node list of a role, by the role's index."""
    return f"MONARCH_NODES_{role}"


PORT_OFFSET = "MONARCH_PORT_OFFSET"
"""The variable by which hosts shift the port where they meet: array tasks of one request may be on one node."""


def first_node(nodes: str) -> str:
    """The first name of a node list: ``n08`` of ``n[08-11,20],m1``. (To ask scontrol would delay every start.)"""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None
    return re.sub(r"\[([^\]\-,]*)[^\]]*\]", r"\1", first[0])


def filled(
    command: Sequence[str], env: Mapping[str, str], image: str, app_id: str, replica: int
) -> tuple[list[str], dict[str, str]]:
    """Command and environment of one replica (as ``torchx.specs.macros.Values`` has it)."""
    values = {"img_root": image, "app_id": app_id, "replica_id": str(replica), "rank0_env": RANK0_HOST}

    def fill(text: str) -> str:
        return Template(text).safe_substitute(values)

    # The entrypoint holds no macros.
    return [command[0], *map(fill, command[1:])], {name: fill(value) for name, value in env.items()}
