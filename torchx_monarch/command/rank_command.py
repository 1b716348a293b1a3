# SPDX-License-Identifier: BSD-3-Clause
"""Find the rank command of a role: the torchrun or Python command whose processes are the ranks.

It stands at the command position (``command_position``) of the role's words, or of a command in the string of a ``bash
-c``. A command that is invalid raises ``CommandError``, which names the role.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchx.specs import Role

from torchx_monarch.command.allocation_spec import AllocationSpec
from torchx_monarch.command.command import Command, CommandError, check, parse
from torchx_monarch.command.command_position import SETS_PATH, CommandPosition, command_position
from torchx_monarch.command.shell import SHELLS, shell_operand, simple_commands, substitute
from torchx_monarch.command.torchrun_options import OPTIONS, UNEXPANDED

_TORCHRUN = re.compile(r"\btorchrun\b|\btorch\.distributed\.run\b")
_VARIABLES = frozenset(option.variable for option in OPTIONS if option.env)
_READS_VARIABLES = frozenset({"source", ".", "eval"})
"""Commands of a shell that may set any variable."""


@dataclass(frozen=True)
class ExecutedCommand:
    """A command that a role executes, and where it begins.

    Attributes:
        runners: the words before it in the same command, such as ``env A=1``.
        words: its own words.
        position: what the runners do to it.
        string: index of the argument that is a shell string with the command in it; None for other roles.
        start: offset of the command in that string; otherwise the index of its first word in the role's words, which
            begin with the entrypoint.
        context: what may set its variables: the runners, or the whole string.
        sets_path: whether that may change PATH, so that another torchrun or Python is found.
        is_alone: whether the role executes no other command.
        is_looped: whether it is inside a loop.
    """

    runners: Sequence[str]
    words: Sequence[str]
    position: CommandPosition
    string: int | None
    start: int
    context: str
    sets_path: bool
    is_alone: bool = True
    is_looped: bool = False


@dataclass(frozen=True)
class RankCommand:
    """The rank command of a role, as it was parsed and as it is executed."""

    command: Command
    place: ExecutedCommand


def executed_commands(role: Role) -> Iterator[ExecutedCommand]:
    """Yield the commands that a role executes: that of its words, or those in the string of its shell."""
    words = [role.entrypoint, *map(substitute, role.args)]
    position = command_position(words)
    if position is None:
        return
    sets_path = position.sets_path or "PATH" in role.env
    if os.path.basename(words[position.start]) not in SHELLS:
        runners, own = words[: position.start], words[position.start :]
        yield ExecutedCommand(runners, own, position, None, position.start, " ".join(runners), sets_path)
        return
    string = position.start + shell_operand(words[position.start :])[0] - 1
    # A login shell reads the user's profile.
    sets_path |= any(word.startswith("-") and "l" in word for word in words[position.start + 1 : string + 1])
    for simple in simple_commands(role.args[string]) if string < len(role.args) else ():
        words = [word.value for word in simple.words]
        if position := command_position(words):
            text, start = role.args[string], simple.words[position.start].start
            sets = sets_path or position.sets_path or not simple.alone or bool(SETS_PATH.search(text[:start]))
            runners, own = words[: position.start], words[position.start :]
            yield ExecutedCommand(runners, own, position, string, start, text, sets, simple.alone, simple.looped)


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
    executed = [*executed_commands(role)]
    reads_variables = any(place.string is not None and place.words[0] in _READS_VARIABLES for place in executed)
    parsed = [(_parse(place, role, reads_variables), place) for place in executed]
    # Of several commands each may be a Python program, which does not tell that it is the ranks'.
    found = [RankCommand(c, place) for c, place in parsed if c is not None and (c.kind != "python" or place.is_alone)]
    if len(found) > 1:
        raise CommandError(
            f"its shell string holds {len(found)} torchrun commands, and a role can execute one. Make a role of each, "
            "or leave it to one torchrun to start the other."
        )
    if found and found[0].place.is_looped:
        raise CommandError(
            "the torchrun in its shell string is in a loop, and a role runs one. Put the loop into the script, or "
            "submit one job for each turn."
        )
    return found[0] if found else None


def _parse(place: ExecutedCommand, role: Role, reads_variables: bool) -> Command | None:
    """Parse a command of a role; return None if it starts no ranks."""
    unexpanded = {name for name in _VARIABLES if reads_variables or name in place.context}
    env = {name: substitute(value) for name, value in role.env.items()} | dict.fromkeys(unexpanded, UNEXPANDED)
    command = parse(place.words, env)
    if command is None:
        return None
    if command.kind == "hosts":
        AllocationSpec.from_command(command, env, role.num_replicas)
    if place.position.is_cleared and role.num_replicas > 1:
        raise CommandError(
            f"`{' '.join(place.runners)}` removes the variables by which hosts find each other. Remove single ones by "
            "name: env -u NAME."
        )
    return command


# -- launchers of others -----------------------------------------------------------------------------------------------

# On one host such a launcher is a command like any other. On several, each host would start the ranks as if it were the
# only one, unless the command gives its number.

_LAUNCHERS = {
    "accelerate": ("launch", "num_processes"),
    "composer": ("", "n|nproc|world_size"),
    "deepspeed": ("", "num_gpus"),
    "fabric": ("run", "devices"),
    "lightning": ("run", "devices"),
}
"""The verb of each launcher, and its options for the number of ranks."""

_HOST_NUMBER = re.compile("--(machine_rank|node[_-]rank)")


def launcher(words: Sequence[str], replicas: int = 0) -> tuple[str, str] | None:
    """Return the launcher that ``words`` execute, and what to type after ``monarch.spmd`` to do the same.

    Return None if they execute none, or one that is told the number of its host.

    Args:
        replicas: number of hosts; 0 if it is not known.
    """
    verb, count = _LAUNCHERS.get(os.path.basename(words[0]), (None, ""))
    if verb is None or (verb and verb not in words[1:2]) or any(map(_HOST_NUMBER.match, words)):
        return None
    flags = ("-m", "--module")
    start = next((index for index, word in enumerate(words) if word in flags or word.endswith(".py")), len(words))
    program = ["-m" if word in flags and not index else word for index, word in enumerate(words[start:])] or ["PROGRAM"]
    given = re.search(rf"(?:^|\s)--?(?:{count})[ =](\d+)(?=\s|$)", " ".join(words[:start]))
    ranks = int(given[1]) if given else 0
    if words[0].endswith("accelerate") and replicas and ranks % replicas == 0:  # of all hosts
        ranks //= replicas
    shape = f"{replicas or 'NODES'}x{ranks or 'RANKS'}"
    return f"{os.path.basename(words[0])} {verb}".strip(), f"-j {shape} {shlex.join(program)}"


def launchers(role: Role) -> Iterator[tuple[str, str]]:
    """Yield what ``launcher`` finds among the commands of a role, those of a shell string included."""
    for command in executed_commands(role):
        if found := launcher(command.words, role.num_replicas):
            yield found
