# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""An allocation that waits for runs: what its command means, and what a run of it runs.

``python -m torchx_monarch.hosts [--idle-timeout SECONDS] [--nproc N] [-- COMMAND]``
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from torchx_monarch.command.command import Command, CommandError, check, is_process_count, parse
from torchx_monarch.command.torchrun_options import HelpRequested

IDLE_TIMEOUT = 1800.0
"""Seconds without a run after which hosts end, unless told otherwise."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(f"torchx_monarch.hosts: {message}")


def _parser() -> _Parser:
    parser = _Parser(prog="python -m torchx_monarch.hosts", add_help=False, allow_abbrev=False)
    parser.add_argument("--idle-timeout", type=float, default=IDLE_TIMEOUT)
    parser.add_argument("--nproc", default="")
    return parser


@dataclass(frozen=True)
class AllocationSpec:
    """An allocation's command.

    Attributes:
        idle_timeout: seconds without a run after which the hosts end; 0 for never.
        nproc: for how many ranks interpreters are kept ready before the first run: as torchrun's ``--nproc-per-node``,
            or ``0``.
        words: what a run runs that names nothing else; empty for nothing.
        command: the same, parsed; None for nothing.
    """

    idle_timeout: float
    nproc: str
    words: tuple[str, ...]
    command: Command | None

    @classmethod
    def of(cls, command: Command, env: Mapping[str, str], replicas: int, role: str) -> AllocationSpec:
        """What a command of kind ``hosts`` says.

        Args:
            command: of kind ``hosts``.
            env: the environment that it runs in.
            replicas: the role's.
            role: its name, for messages.

        Raises:
            CommandError: an option makes no sense, or the command after ``--`` cannot be run.
        """
        args = list(command.program.args)
        end = args.index("--") if "--" in args else len(args)
        try:
            options = _parser().parse_args(args[:end])
        except CommandError as error:
            raise CommandError(f"role {role!r}: {error}") from None
        if not 0 <= options.idle_timeout < float("inf"):
            reason = f"--idle-timeout {options.idle_timeout:g}: give seconds, or 0 for never"
            raise CommandError(f"role {role!r}: torchx_monarch.hosts: {reason}")
        if options.nproc not in ("", "0") and not is_process_count(options.nproc):
            reason = f"--nproc {options.nproc}: use a number, or one of auto, gpu, cpu, xpu"
            raise CommandError(f"role {role!r}: torchx_monarch.hosts: {reason}")
        words = tuple(args[end + 1 :])
        inner = run_command(words, env, replicas, role) if words else None
        own = "1" if inner is None or inner.kind != "torchrun" else inner.options.nproc_per_node
        return cls(options.idle_timeout, options.nproc or own, words, inner)


def run_command(words: Sequence[str], env: Mapping[str, str], replicas: int, role: str, nproc: str = "") -> Command:
    """What a run's command means on an allocation: without ``--nnodes`` it is for all its hosts.

    Args:
        words: a torchrun or Python command.
        env: the environment that it runs in.
        replicas: the allocation's hosts.
        role: for messages.
        nproc: processes for each host, instead of what the command says; empty for that.

    Raises:
        CommandError: it cannot be run on them.
    """
    command = parse(words, {"PET_NNODES": str(replicas), **env})
    if command is None or command.kind == "hosts":
        raise CommandError(f"role {role!r}: not a torchrun or Python command: {' '.join(words)!r}")
    if nproc:
        if not is_process_count(nproc):
            raise CommandError(f"role {role!r}: nproc={nproc}: use a number above 0, or one of auto, gpu, cpu, xpu")
        if command.kind != "torchrun":
            raise CommandError(f"role {role!r}: nproc={nproc} is for torchrun commands, and this is one of Python")
        command = dataclasses.replace(command, options=dataclasses.replace(command.options, nproc_per_node=nproc))
    check(command, replicas=replicas, role=role)
    return command


def with_program(held: Command | None, program: Sequence[str]) -> Command:
    """The allocation's command with another program: its script (or ``-m`` and a module) and the arguments.

    Raises:
        CommandError: the program is none.
    """
    module = list(program[:1]) == ["-m"]
    try:
        parsed = parse(["torchrun", *(("--",) if not module else ()), *program])
    except (CommandError, HelpRequested) as error:
        raise CommandError(f"not a script with its arguments, nor -m and a module: {' '.join(program)!r}") from error
    assert parsed is not None
    if held is None:
        return parsed
    return dataclasses.replace(held, program=parsed.program)
