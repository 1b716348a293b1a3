# SPDX-License-Identifier: BSD-3-Clause
"""Replace TorchX's macros in a role's command and environment.

All nodes of a role share one container definition. A node computes its replica number when it runs, from Batch's node
index, which counts through all roles. If a role of several replicas uses its number, its command is wrapped in a shell
that computes it. So the image needs no part of this package.
"""

from __future__ import annotations

import re
import shlex

from torchx.specs import Role, macros

from torchx_monarch.backends.core.errors import UserError

RANK0 = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"
"""Batch's variable with the address of the main node (replica 0 of the first role); Batch leaves it unset there."""

REPLICA = "TORCHX_REPLICA_ID"
"""The shell variable that holds the replica number."""

_UNKNOWN = "\0"
"""Placeholder for the replica number. No argument and no environment variable can contain a null character."""


def render(role: Role, app_id: str, first: int) -> tuple[list[str], dict[str, str]]:
    """Return the words of a role's command, and its environment.

    Args:
        role: the role.
        app_id: the app's id.
        first: node index of the role's replica 0.

    Raises:
        UserError: a variable's name is reserved by Batch, or no shell can set it though its value uses the replica
            number.
    """
    is_single = role.num_replicas == 1
    values = macros.Values(img_root="", app_id=app_id, replica_id="0" if is_single else _UNKNOWN, rank0_env=RANK0)
    filled = values.apply(role)
    words, env = [filled.entrypoint, *filled.args], dict(filled.env)
    for name in env:
        if name.startswith("AWS_BATCH"):
            raise UserError(
                f"role {role.name!r} sets {name}; AWS Batch keeps names that begin with AWS_BATCH for itself"
            )
    late = {name: value for name, value in env.items() if _UNKNOWN in value}
    if not late and not any(_UNKNOWN in word for word in words):
        return words, env
    lines = [f"{REPLICA}=$((${{AWS_BATCH_JOB_NODE_INDEX:-{first}}} - {first}))"]
    for name, value in late.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise UserError(
                f"role {role.name!r}: the value of {name!r} holds ${{replica_id}}, and a shell cannot set that name"
            )
        lines.append(f"export {name}={_quoted(value)}")
        del env[name]
    lines.append("exec " + " ".join(map(_quoted, words)))
    return ["sh", "-c", "\n".join(lines)], env


def _quoted(text: str) -> str:
    """Quote a text as one shell word, with the placeholder replaced by the shell variable."""
    return f'"${REPLICA}"'.join(shlex.quote(part) if part else "" for part in text.split(_UNKNOWN)) or "''"
