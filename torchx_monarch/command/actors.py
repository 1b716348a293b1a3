# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Build and parse the command of roles whose hosts run the actors of a Monarch client, and no ranks.

The command is ``python -m torchx_monarch.actors [--idle-timeout S] [-- python SCRIPT ARGS]``. The script is a client
that runs on replica 0; without a script, clients connect from outside. The schedulers wrap the command like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchx_monarch.command.allocation_spec import IDLE_TIMEOUT
from torchx_monarch.command.command import ACTORS_MODULE, Command, CommandError, parse


@dataclass(frozen=True)
class Actors:
    """The options of an actors command.

    Attributes:
        idle_timeout: seconds without a client after which the hosts end; 0 for never.
        script: the client that runs on replica 0; None if clients connect from outside.
    """

    idle_timeout: float
    script: Command | None


def actors_command(idle_timeout: float, script: Sequence[str] = ()) -> list[str]:
    """Return the words of an actors command.

    Args:
        idle_timeout: seconds without a client after which the hosts end; 0 for never.
        script: a Python command, such as ``("python", "client.py")``; empty for no script.
    """
    words = ["python", "-m", ACTORS_MODULE, "--idle-timeout", f"{idle_timeout:g}"]
    return [*words, "--", *script] if script else words


def is_actors(words: Sequence[str]) -> bool:
    """Whether the words are an actors command."""
    return "-m" in words and list(words[words.index("-m") + 1 :])[:1] == [ACTORS_MODULE]


def parse_actors(command: Command, env: Mapping[str, str]) -> Actors:
    """Parse the options of a command of kind ``actors``.

    Raises:
        CommandError: an option is invalid, or the command after ``--`` is not a Python command.
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
