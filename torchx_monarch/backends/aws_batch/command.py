# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A role's command and environment with TorchX's macros replaced.

All nodes of a role have one definition, so which replica a node is it learns when it runs, from Batch's node index,
which counts through all roles. Where a role of several replicas asks for its number, a shell works it out: no part of
ours is needed in the image.
"""

from __future__ import annotations

import re
import shlex

from torchx.specs import Role, macros

RANK0 = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"
"""Batch's variable with the address of the main node, replica 0 of the first role; not set on that node itself."""

REPLICA = "TORCHX_REPLICA_ID"
"""The variable in which the shell has the replica."""

_UNKNOWN = "\0"
"""Stands for the replica in a text. No word of a command and no variable can hold it."""


def render(role: Role, app_id: str, first: int) -> tuple[list[str], dict[str, str]]:
    """The words of the command, and the environment.

    Args:
        role: what runs.
        app_id: the app's id.
        first: node index of the role's replica 0.

    Raises:
        ValueError: a variable whose value holds the replica's number has a name that no shell can set, or Batch keeps
            its name for itself.
    """
    known = role.num_replicas == 1
    values = macros.Values(img_root="", app_id=app_id, replica_id="0" if known else _UNKNOWN, rank0_env=RANK0)
    filled = values.apply(role)
    words, env = [filled.entrypoint, *filled.args], dict(filled.env)
    for name in env:
        if name.startswith("AWS_BATCH"):
            raise ValueError(
                f"role {role.name!r} sets {name}; AWS Batch keeps names that begin with AWS_BATCH for itself"
            )
    late = {name: value for name, value in env.items() if _UNKNOWN in value}
    if not late and not any(_UNKNOWN in word for word in words):
        return words, env
    lines = [f"{REPLICA}=$((${{AWS_BATCH_JOB_NODE_INDEX:-{first}}} - {first}))"]
    for name, value in late.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise ValueError(
                f"role {role.name!r}: the value of {name!r} holds ${{replica_id}}, and a shell cannot set that name"
            )
        lines.append(f"export {name}={_quoted(value)}")
        del env[name]
    lines.append("exec " + " ".join(map(_quoted, words)))
    return ["sh", "-c", "\n".join(lines)], env


def _quoted(text: str) -> str:
    """As a word of a shell, with the variable where the replica stands."""
    return f'"${REPLICA}"'.join(shlex.quote(part) if part else "" for part in text.split(_UNKNOWN)) or "''"
