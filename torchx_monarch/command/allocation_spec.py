# SPDX-License-Identifier: BSD-3-Clause
"""Parse the command of an allocation, the commands of its runs, and that of a Monarch controller script.

The command of an allocation is ``python -m torchx_monarch.hosts [--idle-timeout SECONDS] [--nproc N]
[--end-with-mesh] [-- COMMAND]``.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from torchx_monarch.command.command import (
    ACTORS_MODULE,
    PROCESS_COUNT,
    Command,
    CommandError,
    check,
    is_process_count,
    parse,
)
from torchx_monarch.command.torchrun_options import HelpRequested

IDLE_TIMEOUT = 1800.0
"""Default number of seconds without a run (or without a client of actors) after which the hosts end."""


class _AllocationParser(argparse.ArgumentParser):
    def __init__(self) -> None:
        super().__init__(prog="python -m torchx_monarch.hosts", add_help=False, allow_abbrev=False)
        self.add_argument("--idle-timeout", type=float, default=IDLE_TIMEOUT)
        self.add_argument("--nproc", default="")
        self.add_argument("--end-with-mesh", action="store_true")

    def error(self, message: str) -> NoReturn:
        raise CommandError(message)


@dataclass(frozen=True)
class AllocationSpec:
    """The options of an allocation, parsed from its command.

    Attributes:
        idle_timeout: seconds without a run after which the hosts end; 0 for never.
        nproc: number of ranks per host that is expected: a value of torchrun's ``--nproc-per-node``; or ``0`` to import
            torch no sooner than for the first run.
        words, command: default command of a run; empty and None if each run must name a command.
        ends_with_mesh: whether ``HostMesh.shutdown()`` of a Monarch client ends the hosts, and not only its actors.
    """

    idle_timeout: float
    nproc: str
    words: tuple[str, ...]
    command: Command | None
    ends_with_mesh: bool = False

    @classmethod
    def from_command(cls, command: Command, env: Mapping[str, str], replicas: int) -> AllocationSpec:
        """Parse the options of a command of kind ``hosts``."""
        args = list(command.program.args)
        end = args.index("--") if "--" in args else len(args)
        try:
            options = _AllocationParser().parse_args(args[:end])
            if not 0 <= options.idle_timeout < float("inf"):
                raise CommandError(f"--idle-timeout {options.idle_timeout:g}: give seconds, or 0 for never")
            if options.nproc not in ("", "0") and not is_process_count(options.nproc):
                raise CommandError(f"--nproc {options.nproc}: use {PROCESS_COUNT}; or 0")
        except CommandError as error:
            raise CommandError(f"torchx_monarch.hosts: {error}") from None
        words = tuple(args[end + 1 :])
        inner = run_command(words, env, replicas) if words else None
        own = "1" if inner is None or inner.kind != "torchrun" else inner.options.nproc_per_node
        return cls(options.idle_timeout, options.nproc or own, words, inner, options.end_with_mesh)


def run_command(words: Sequence[str], env: Mapping[str, str], replicas: int, nproc: str = "") -> Command:
    """Parse the command of a run, by default on all hosts of the allocation; ``nproc`` replaces its own if given."""
    command = parse(words, {"PET_NNODES": str(replicas), **env})
    if command is None or command.kind == "hosts":
        raise CommandError(f"not a torchrun or Python command: {' '.join(words)!r}")
    if nproc:
        if command.kind != "torchrun":
            raise CommandError(f"nproc={nproc} is for torchrun commands, and this is one of Python")
        command = dataclasses.replace(command, options=dataclasses.replace(command.options, nproc_per_node=nproc))
    check(command, replicas=replicas)
    return command


def with_program(held: Command | None, program: Sequence[str]) -> Command:
    """Replace the program of a default command, or of torchrun without options, by a script or ``-m`` and a module."""
    module = list(program[:1]) == ["-m"]
    try:
        parsed = parse(["torchrun", *(("--",) if not module else ()), *program])
    except (CommandError, HelpRequested) as error:
        raise CommandError(f"not a script with its arguments, nor -m and a module: {' '.join(program)!r}") from error
    assert parsed is not None
    if held is None:
        return parsed
    return dataclasses.replace(held, program=parsed.program)


def script_command(script: Sequence[str]) -> list[str]:
    """Return the words of the command that runs a script, which is a Python command."""
    return ["python", "-m", ACTORS_MODULE, "--", *script]


def parse_script(command: Command, env: Mapping[str, str]) -> Command:
    """Return the Python command of the script of a command of kind ``actors``."""
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
