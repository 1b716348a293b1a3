# SPDX-License-Identifier: BSD-3-Clause
"""Find the rank command of a role: the torchrun or Python command whose processes are the ranks.

It may be the role's command, part of the string of a ``bash -c``, or among the arguments of a set-up script. A command
that is invalid raises ``CommandError``, which names the role.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torchx.specs import Role

from torchx_monarch.command.allocation_spec import AllocationSpec
from torchx_monarch.command.command import Command, CommandError, check, parse
from torchx_monarch.command.shell import SimpleCommand, command_string, simple_commands, substitute
from torchx_monarch.command.torchrun_options import UNEXPANDED

_NPROC = "PET_NPROC_PER_NODE"
"""The variable from which torchrun takes the number of ranks if it is not typed."""


@dataclass(frozen=True)
class RankCommand:
    """The rank command of a role, and where it begins.

    Attributes:
        string: index of the argument that is a shell string with the command in it; None for other roles.
        start: offset of the command in that string; otherwise the index of its first word in the role's words, which
            begin with the entrypoint.
    """

    command: Command
    string: int | None
    start: int


def rank_command(role: Role) -> Command | None:
    """Return the rank command of a role as submitted; None if it has none, or an invalid one."""
    try:
        found = find_rank_command(role)
    except CommandError:
        return None
    return found.command if found is not None else None


def find_rank_command(role: Role) -> RankCommand | None:
    """Return the rank command of a role; None if it has none.

    Raises:
        CommandError: the command is invalid, or does not fit the role.
    """
    string = command_string(role.entrypoint, role.args)
    if string is not None:
        return _find_in_string(role, string)
    plain = [role.entrypoint, *(substitute(arg)[0] for arg in role.args)]
    for position in range(len(plain)):
        command = _command(plain[position:], role)
        if command is not None:
            # The words before it are a set-up script that executes its arguments. A torchrun among them is the rank
            # command; a plain python may be an argument with another meaning.
            return RankCommand(command, None, position) if position == 0 or command.kind != "python" else None
    return None


def _find_in_string(role: Role, string: int) -> RankCommand | None:
    """Find the rank command of a role in the argument of this index, which is a shell string."""
    found: list[tuple[SimpleCommand, Command]] = []
    for simple in simple_commands(role.args[string]):
        # The commands before it may set the variable: `source env.sh; torchrun train.py`.
        is_alone = simple.alone and _NPROC not in role.args[string]
        command = _command([word.value for word in simple.words], role, {} if is_alone else {_NPROC: UNEXPANDED})
        if command is not None and (command.kind != "python" or simple.alone):
            found.append((simple, command))
    if not found:
        return None
    (simple, command), *others = found
    text, reason = f"the string of `{role.entrypoint} -c`", ""
    if others:
        reason = (
            f"{text} holds {len(found)} torchrun commands, and a role can execute one. Make a role of each, or leave "
            "it to one torchrun to start the other."
        )
    elif simple.looped:
        reason = (
            f"the torchrun in {text} is in a loop, and a role runs one. Put the loop into the script, or submit one "
            "job for each turn."
        )
    if reason:
        raise CommandError(f"role {role.name!r}: {reason}")
    return RankCommand(command, string, simple.words[0].start)


def _command(words: Sequence[str], role: Role, more: Mapping[str, str] = MappingProxyType({})) -> Command | None:
    """Parse ``words`` and check the command against the role; return None if it starts no ranks."""
    env = {**{name: substitute(value)[0] for name, value in role.env.items()}, **more}
    try:
        command = parse(words, env)
    except CommandError as error:
        raise CommandError(f"role {role.name!r}: {error}") from None
    if command is not None:
        check(command, replicas=role.num_replicas, role=role.name)
        if command.kind == "hosts":
            AllocationSpec.from_command(command, env, role.num_replicas, role.name)
    return command
