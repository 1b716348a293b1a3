# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Roles whose hosts run no ranks: a Monarch client's actors run there, or a script on replica 0 that is such a client.

The command is ``python -m torchx_monarch.actors [--idle-timeout S] [-- python SCRIPT ARGS]``; the schedulers wrap it as
they wrap any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchx_monarch.command.allocation_spec import IDLE_TIMEOUT
from torchx_monarch.command.command import ACTORS_MODULE, Command, CommandError, parse


@dataclass(frozen=True)
class Actors:
    """What such a command says.

    Attributes:
        idle_timeout: seconds without a client until the hosts end; 0 for never.
        script: the client that runs on replica 0; None where clients come from without.
    """

    idle_timeout: float
    script: Command | None


def actors_command(idle_timeout: float, script: Sequence[str] = (), python: str = "python") -> list[str]:
    """The words of such a command.

    Args:
        idle_timeout: seconds without a client until the hosts end; 0 for never.
        script: a python command, ``("python", "client.py")``.
        python: the interpreter, as the replica finds it.
    """
    words = [python, "-m", ACTORS_MODULE, "--idle-timeout", f"{idle_timeout:g}"]
    return [*words, "--", *script] if script else words


def is_actors(words: Sequence[str]) -> bool:
    """Whether these are the words of such a command."""
    return "-m" in words and list(words[words.index("-m") + 1 :])[:1] == [ACTORS_MODULE]


def parse_actors(command: Command, env: Mapping[str, str]) -> Actors:
    """Read the options of a command of kind ``actors``.

    Args:
        command: what ``command.parse`` returned.
        env: the environment that it runs in.

    Raises:
        CommandError: they are not as above.
    """
    words, idle_timeout = list(command.program.args), IDLE_TIMEOUT
    if words[:1] == ["--idle-timeout"] and len(words) > 1:
        try:
            idle_timeout = float(words[1])
        except ValueError:
            idle_timeout = -1.0
        if not 0 <= idle_timeout < float("inf"):
            raise CommandError(f"--idle-timeout {words[1]}: give seconds, or 0 for no timeout")
        del words[:2]
    if not words:
        return Actors(idle_timeout, None)
    if words[0] != "--" or len(words) == 1:
        raise CommandError(f"{ACTORS_MODULE} takes --idle-timeout SECONDS and `-- python SCRIPT`, not {words[0]!r}")
    script = parse(words[1:], env)
    if script is None or script.kind != "python":
        raise CommandError(
            f"{' '.join(words[1:])!r} is no command of the form `python SCRIPT` or `python -m MODULE`: a client of "
            "actors is one Python process"
        )
    return Actors(idle_timeout, script)
