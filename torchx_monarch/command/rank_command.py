# SPDX-License-Identifier: BSD-3-Clause
"""Find the rank command of a role: the torchrun or Python command whose processes are the ranks.

It stands at the command position (``command_position``) of the role's words, or of a command in the string of a ``bash
-c``. A command that is invalid raises ``CommandError``, which names the role.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchx.specs import Role

from torchx_monarch.command.allocation_spec import AllocationSpec
from torchx_monarch.command.command import Command, CommandError, check, parse
from torchx_monarch.command.command_position import SETS_PATH, CommandPosition, command_position
from torchx_monarch.command.shell import SHELLS, SimpleCommand, shell_operand, simple_commands, substitute
from torchx_monarch.command.torchrun_options import OPTIONS, UNEXPANDED

_TORCHRUN = re.compile(r"\btorchrun\b|\btorch\.distributed\.run\b")
_VARIABLES = frozenset(option.variable for option in OPTIONS if option.env)
_READS_VARIABLES = frozenset({"source", ".", "eval"})
"""Commands of a shell that may set any variable."""


@dataclass(frozen=True)
class RankCommand:
    """The rank command of a role, and where it begins.

    Attributes:
        string: index of the argument that is a shell string with the command in it; None for other roles.
        start: offset of the command in that string; otherwise the index of its first word in the role's words, which
            begin with the entrypoint.
        sets_path: whether something before it may change PATH, so that another torchrun or Python is found.
        is_renamed: whether it gets another name (``exec -a NAME``).
    """

    command: Command
    string: int | None
    start: int
    sets_path: bool
    is_renamed: bool


def rank_command(role: Role) -> Command | None:
    """Return the rank command of a role as submitted; None if it has none, or an invalid one."""
    try:
        found = find_rank_command(role)
    except CommandError:
        return None
    return found.command if found is not None else None


def names_torchrun(role: Role) -> bool:
    """Return whether torchrun occurs in the words of a role, whether or not it is a command there."""
    return any(_TORCHRUN.search(word) for word in (role.entrypoint, *role.args))


def find_rank_command(role: Role) -> RankCommand | None:
    """Return the rank command of a role; None if it has none.

    Raises:
        CommandError: the command is invalid, or does not fit the role.
    """
    try:
        found = locate_rank_command(role)
    except CommandError as error:
        raise CommandError(f"role {role.name!r}: {error}") from None
    if found is not None:
        check(found.command, replicas=role.num_replicas, role=role.name)
    return found


def locate_rank_command(role: Role) -> RankCommand | None:
    """Return the rank command of a role, whatever number of replicas the role has; None if it has none.

    Raises:
        CommandError: the command is invalid. The message does not name the role.
    """
    words = [role.entrypoint, *(substitute(arg)[0] for arg in role.args)]
    position = command_position(words)
    if position is None:
        return None
    sets_path = position.sets_path or "PATH" in role.env
    shell = words[position.start]
    if os.path.basename(shell) in SHELLS:
        string = position.start + shell_operand(words[position.start :])[0]
        # A login shell reads the user's profile.
        sets_path |= any(word.startswith("-") and "l" in word for word in words[position.start + 1 : string])
        return _find_in_string(role, string - 1, shell, sets_path) if string < len(words) else None
    command = _command(words, position, role, _variables_in(" ".join(words[: position.start])))
    return RankCommand(command, None, position.start, sets_path, position.is_renamed) if command else None


def _find_in_string(role: Role, string: int, shell: str, sets_path: bool) -> RankCommand | None:
    """Find the rank command of a role in the argument of this index, which is the string of a shell."""
    text = role.args[string]
    commands = list(simple_commands(text))
    reads_variables = any(simple.words[0].value in _READS_VARIABLES for simple in commands)
    variables = _VARIABLES if reads_variables else _variables_in(text)
    found: list[tuple[SimpleCommand, RankCommand]] = []
    for simple in commands:
        words = [word.value for word in simple.words]
        position = command_position(words)
        command = position and _command(words, position, role, variables)
        # Of several commands each may be a Python program, which does not tell that it is the ranks'.
        if position and command and (command.kind != "python" or simple.alone):
            start = simple.words[position.start].start
            sets = sets_path or position.sets_path or not simple.alone or bool(SETS_PATH.search(text[:start]))
            found.append((simple, RankCommand(command, string, start, sets, position.is_renamed)))
    if not found:
        return None
    (simple, rank_command), *others = found
    place, reason = f"the string of `{shell} -c`", ""
    if others:
        reason = (
            f"{place} holds {len(found)} torchrun commands, and a role can execute one. Make a role of each, or leave "
            "it to one torchrun to start the other."
        )
    elif simple.looped:
        reason = (
            f"the torchrun in {place} is in a loop, and a role runs one. Put the loop into the script, or submit one "
            "job for each turn."
        )
    if reason:
        raise CommandError(reason)
    return rank_command


def _variables_in(text: str) -> frozenset[str]:
    """Return the variables of torchrun's options that occur in a text, which may set them."""
    return frozenset(name for name in _VARIABLES if name in text)


def _command(words: Sequence[str], position: CommandPosition, role: Role, unexpanded: Iterable[str]) -> Command | None:
    """Parse the command at a position; return None if it starts no ranks.

    Args:
        unexpanded: the variables whose values are not known before the command runs.
    """
    env = {name: substitute(value)[0] for name, value in role.env.items()} | dict.fromkeys(unexpanded, UNEXPANDED)
    command = parse(words[position.start :], env)
    if command is None:
        return None
    if command.kind == "hosts":
        AllocationSpec.from_command(command, env, role.num_replicas)
    if position.is_cleared and role.num_replicas > 1:
        before = " ".join(words[: position.start])
        raise CommandError(
            f"`{before}` removes the variables by which hosts find each other. Remove single ones by name: env -u NAME."
        )
    return command
