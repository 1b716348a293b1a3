# SPDX-License-Identifier: BSD-3-Clause
"""Build and parse the command of a role whose first host runs the script of a Monarch controller, and no other ranks.

The command is ``python -m torchx_monarch.actors -- python SCRIPT ARGS``. The hosts of all roles of the app are meshes
of the script (``client.this_job``). The schedulers wrap the command like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchx_monarch.command.command import ACTORS_MODULE, Command, CommandError, parse


def script_command(script: Sequence[str]) -> list[str]:
    """Return the words of the command that runs a script.

    Args:
        script: a Python command, such as ``("python", "main.py")``.
    """
    return ["python", "-m", ACTORS_MODULE, "--", *script]


def parse_script(command: Command, env: Mapping[str, str]) -> Command:
    """Return the Python command of the script of a command of kind ``actors``.

    Raises:
        CommandError: what follows ``--`` is not a Python command.
    """
    separator, words = command.program.args[:1], command.program.args[1:]
    if separator != ("--",) or not words:
        given = " ".join(command.program.args) or "nothing"
        raise CommandError(f"{ACTORS_MODULE} takes `-- python SCRIPT`, not {given!r}")
    script = parse(words, env)
    if script is None or script.kind != "python":
        raise CommandError(
            f"{' '.join(words)!r} is no command of the form `python SCRIPT` or `python -m MODULE`: a client of "
            "actors is one Python process"
        )
    return script
