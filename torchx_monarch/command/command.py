# SPDX-License-Identifier: BSD-3-Clause
"""Parse the command of a role: the program of the ranks, their number, and the torchrun options.

A ``CommandError`` tells users why a command cannot run: torchrun itself would reject it, or it is not supported. Its
message names the option, its value and the alternative.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Template
from types import MappingProxyType
from typing import Literal

from torchx_monarch.command.torchrun_options import (
    DEFAULTS,
    OPTIONS,
    UNEXPANDED,
    HelpRequested,
    Streams,
    TorchrunOptions,
    parse_options,
)
from torchx_monarch.model.world import CommandError

__all__ = ["Command", "CommandError", "Program", "Streams", "TorchrunOptions", "check", "parse"]

HOST_MODULE = "torchx_monarch.host"
"""The module that runs in every replica: ``python -m torchx_monarch.host [options] -- COMMAND``."""

ACTORS_MODULE = "torchx_monarch.actors"
"""The module of the command that runs the script of a Monarch controller (``command.allocation_spec``)."""

HOSTS_MODULE = "torchx_monarch.hosts"
"""The module of the command of an allocation (``command.allocation_spec``)."""

_TORCHRUN_MODULES = ("torch.distributed.run", "torchrun")
_PROCESS_COUNTS = ("auto", "gpu", "cpu", "xpu")
_MAX_PROCESSES = 1 << 16
PROCESS_COUNT = f"a number from 1 to {_MAX_PROCESSES}, or one of {', '.join(_PROCESS_COUNTS)}"
"""What ``--nproc-per-node`` can be: more ranks than that no host can start."""

_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_PYTHON_FLAGS = frozenset("bBdEIOPqRsStuvx")
_PYTHON_FLAGS_WITH_VALUE = frozenset("WX")


@dataclass(frozen=True)
class Program:
    """The program that each rank executes.

    Attributes:
        mode: ``script``: ``python TARGET ARGS``; ``module``: ``python -m TARGET ARGS``; ``code``:
            ``python -c TARGET ARGS``; ``exec``: ``TARGET ARGS``, without Python.
        target: path of the script or executable, name of the module, or code, depending on ``mode``.
    """

    mode: Literal["script", "module", "code", "exec"]
    target: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """A parsed command.

    Attributes:
        kind: ``torchrun``; ``python`` for a plain Python command, which runs one process per replica; ``hosts`` for an
            allocation (``command.allocation_spec``); ``actors`` for the script of a Monarch controller
            (``command.allocation_spec``).
        options: the torchrun options; the defaults for all other kinds.
        program: the program of the ranks; for the kinds ``hosts`` and ``actors``, the module with its options.
        interpreter: command line of the ranks' Python. For kind ``python``, the interpreter with its flags, as typed.
            For kind ``torchrun``, the interpreter that torchrun would use: ``$PYTHON_EXEC``, or X in
            ``X -m torch.distributed.run``. Empty for the interpreter of the host process.
        torchrun: the executable as typed, whose first line names the interpreter if ``interpreter`` is empty; empty for
            commands without it.
    """

    kind: Literal["torchrun", "python", "hosts", "actors"]
    options: TorchrunOptions
    program: Program
    interpreter: tuple[str, ...] = ()
    torchrun: str = ""

    @property
    def ranks_per_host(self) -> int | None:
        """The number of ranks on each host; None if it is not known before the hosts start."""
        if self.kind == "python":
            return 1
        nproc = self.options.nproc_per_node
        is_open = "nproc_per_node" in self.options.unexpanded or UNEXPANDED in self.program.target
        return None if self.kind != "torchrun" or is_open or not re.fullmatch(r"\d{1,9}", nproc) else int(nproc)

    def program_of(self, local_rank: int) -> Program:
        """Return the program of one rank, with torchrun's macro ``${local_rank}`` replaced.

        Like torchrun, replaces the macro in all words but the executable of mode ``exec``. Commands of other kinds have
        no macros.
        """
        if self.kind != "torchrun":
            return self.program
        program = self.program
        target, *args = (
            Template(word).safe_substitute(local_rank=str(local_rank)) for word in (program.target, *program.args)
        )
        return Program(program.mode, program.target if program.mode == "exec" else target, tuple(args))

    def min_nodes(self, replicas: int) -> int:
        """Return the least number of replicas that the job needs: MIN of torchrun's ``--nnodes MIN:MAX``, else all."""
        return self.options.min_nodes if self.kind == "torchrun" else replicas


def parse(argv: Sequence[str], env: Mapping[str, str] = MappingProxyType({})) -> Command | None:
    """Parse a command as torchrun and CPython do.

    Args:
        env: environment variables of the command: ``PET_*`` set torchrun's options, ``PYTHON_EXEC`` its interpreter.

    Returns:
        The parsed command; None if the command starts no ranks (``echo hello``, ``python -V``, ``torchrun --help``) and
        runs unchanged.
    """
    if not argv:
        return None
    name = os.path.basename(argv[0])
    if not is_command(argv[0]):
        return None
    if name in _TORCHRUN_MODULES:  # as a word of its own, torch.distributed.run is understood by monarch.job.spmd, too
        return _torchrun(argv[1:], env, torchrun=argv[0] if name == "torchrun" else "")
    found = _python(argv)
    if found is None:
        return None
    interpreter, program = found
    if program.mode == "module" and program.target in _TORCHRUN_MODULES:
        return _torchrun(program.args, env, interpreter=(argv[0],))
    if program.mode == "module" and program.target == "torch.distributed.launch":
        raise CommandError(
            "torch.distributed.launch is deprecated and not supported. Use torchrun with the same options, "
            "and read LOCAL_RANK from the environment instead of the argument --local-rank."
        )
    if program.mode == "module" and program.target == HOST_MODULE:
        raise CommandError(f"The command already runs {HOST_MODULE}. Give the command that follows its `--`.")
    kind: Literal["python", "hosts", "actors"] = "python"
    if program.mode == "module" and program.target in (HOSTS_MODULE, ACTORS_MODULE):
        kind = "hosts" if program.target == HOSTS_MODULE else "actors"
    return Command(kind, DEFAULTS, program, interpreter)


def is_command(word: str) -> bool:
    name = os.path.basename(word)
    return name in _TORCHRUN_MODULES or _PYTHON.fullmatch(name) is not None


def _torchrun(
    arguments: Sequence[str], env: Mapping[str, str], interpreter: tuple[str, ...] = (), torchrun: str = ""
) -> Command | None:
    try:
        options, target, args = parse_options(arguments, env)
    except HelpRequested:
        return None
    mode: Literal["script", "module", "exec"]
    # As in torchrun (config_from_args), --run-path takes precedence over --no-python and --module.
    mode = "script" if options.run_path else "exec" if options.no_python else "module" if options.module else "script"
    if "PYTHON_EXEC" in env:
        interpreter = (env["PYTHON_EXEC"],)
    return Command("torchrun", options, Program(mode, target, args), interpreter, torchrun)


def _python(argv: Sequence[str]) -> tuple[tuple[str, ...], Program] | None:
    """Split a Python command into the interpreter with its flags, and the program.

    Parses the flags as CPython does: letters may be joined (``-um mod``), a value may be joined or follow.

    Returns:
        None if a rank cannot execute the command: CPython answers it (``-V``, ``--help``, an unknown flag), or reads a
        terminal (``-``, ``-i``).
    """
    position = 1
    while position < len(argv):
        word, interpreter = argv[position], tuple(argv[:position])
        if word == "--":
            return _script(interpreter, argv[position + 1 :])
        if word == "--check-hash-based-pycs":
            position += 2
            continue
        if word.startswith("--"):
            return None
        if not word.startswith("-") or word == "-":
            return _script(interpreter, argv[position:])
        position += 1
        for index, letter in enumerate(word[1:], start=1):
            if letter in "cm":
                flags = (word[:index],) if index > 1 else ()
                words = ([word[index + 1 :]] if word[index + 1 :] else []) + list(argv[position:])
                if not words:
                    return None
                return interpreter + flags, Program("code" if letter == "c" else "module", words[0], tuple(words[1:]))
            if letter in _PYTHON_FLAGS_WITH_VALUE:
                position += index + 1 == len(word)
                break
            if letter not in _PYTHON_FLAGS:
                return None
    return None


def _script(interpreter: tuple[str, ...], words: Sequence[str]) -> tuple[tuple[str, ...], Program] | None:
    if not words or words[0] == "-":
        return None
    return interpreter, Program("script", words[0], tuple(words[1:]))


def check(command: Command, *, replicas: int, role: str = "") -> None:
    """Check that a command can run on its role, whose replicas are torchrun's nodes, before the job is submitted.

    Skips options whose value contains an unexpanded shell expression; the host checks them.

    Args:
        role: name of the role; empty for a run on the hosts of an allocation, whose user may have named no role.
    """
    if command.kind == "torchrun":
        reason = _contradiction(command.options, replicas, not role)
        for option in OPTIONS:
            value = getattr(command.options, option.dest)
            if option.refused and value != getattr(DEFAULTS, option.dest):
                reason = reason or f"torchrun option {option.name}={value} is not supported: {option.refused}."
        if reason is not None:
            raise CommandError(f"role {role!r}: {reason}" if role else reason)


def _contradiction(options: TorchrunOptions, replicas: int, is_run: bool) -> str | None:
    owner, hosts = "role", f"{replicas} replicas"
    if is_run:
        owner, hosts = "allocation", f"{replicas} host{'s' * (replicas > 1)}"
    if options.no_python and options.module and not options.run_path:
        return "torchrun options --no-python and --module contradict each other. Leave one out."
    if options.standalone and replicas > 1:
        return (
            f"torchrun option --standalone is for one node, but the {owner} has {hosts}. "
            f"Leave it out and use --nnodes={replicas}."
        )
    if "nnodes" not in options.unexpanded and not options.min_nodes <= replicas <= options.max_nodes:
        given = ":".join(map(str, dict.fromkeys(options.nnodes)))
        return (
            f"torchrun option --nnodes={given} does not agree with the {owner}'s {hosts}. Use --nnodes={replicas}, or "
            f"{'take other hosts' if is_run else 'change the replicas of the role'}."
        )
    if "rdzv_endpoint" not in options.unexpanded:
        try:
            _ = options.static_endpoint
        except ValueError as error:
            return f"torchrun option --rdzv-endpoint={options.rdzv_endpoint} of the static rendezvous: {error}."
    filters = options.duplicate_stdout_filters or options.duplicate_stderr_filters
    if filters and options.log_dir == os.devnull:
        return (
            f"torchrun options --log-dir={os.devnull} and --duplicate-{{stdout,stderr}}-filters contradict each other: "
            "the filtered lines go into the log folder. Leave one out."
        )
    if "nproc_per_node" not in options.unexpanded and not is_process_count(options.nproc_per_node):
        return (
            f"torchrun option --nproc-per-node={options.nproc_per_node} is not a number of processes. "
            f"Use {PROCESS_COUNT}."
        )
    return None


def is_process_count(text: str) -> bool:
    """Whether a string is a value of ``--nproc-per-node``, ``PROCESS_COUNT``."""
    try:
        return 0 < int(text) <= _MAX_PROCESSES
    except ValueError:
        return text in _PROCESS_COUNTS
