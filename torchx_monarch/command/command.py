# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a role's command means: which program the ranks run, how many of them, and under which torchrun options."""

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
    CommandError,
    HelpRequested,
    Option,
    Streams,
    TorchrunOptions,
    Use,
    parse_options,
)

__all__ = ["Command", "CommandError", "Program", "Streams", "TorchrunOptions", "check", "parse"]

HOST_MODULE = "torchx_monarch.host"
"""The module that runs in every replica: ``python -m torchx_monarch.host [options] -- COMMAND``."""

ACTORS_MODULE = "torchx_monarch.actors"
"""``python -m torchx_monarch.actors [options] [-- SCRIPT]``: the command of hosts that run a client's actors."""

HOSTS_MODULE = "torchx_monarch.hosts"
"""The command of an allocation (``command.allocation_spec``): ``python -m torchx_monarch.hosts [options]``."""

_TORCHRUN_MODULES = ("torch.distributed.run", "torchrun")
PROCESS_COUNTS = ("auto", "gpu", "cpu", "xpu")

_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_PYTHON_FLAGS = frozenset("bBdEIOPqRsStuvx")
_PYTHON_FLAGS_WITH_VALUE = frozenset("WX")


@dataclass(frozen=True)
class Program:
    """What each rank runs.

    Attributes:
        mode: ``script``: ``python TARGET ARGS``; ``module``: ``python -m TARGET ARGS``; ``code``:
            ``python -c TARGET ARGS``; ``exec``: ``TARGET ARGS``, without python.
    """

    mode: Literal["script", "module", "code", "exec"]
    target: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """A command whose meaning is known.

    Attributes:
        kind: ``torchrun``, or ``python`` for a plain python command: one process per replica; ``hosts`` for an
            allocation that waits for runs (``command.allocation_spec``) and ``actors`` for hosts that wait for a
            client's actors (``command.actors``), whose program holds the rest.
        options: torchrun's options; for the other kinds the defaults.
        interpreter: how the ranks' python is called. For kind ``python`` the interpreter with its own flags, as typed.
            For kind ``torchrun`` what torchrun would use if the command tells: ``$PYTHON_EXEC``, or the X of
            ``X -m torch.distributed.run``; otherwise empty, which means the python that the host runs in.
    """

    kind: Literal["torchrun", "python", "hosts", "actors"]
    options: TorchrunOptions
    program: Program
    interpreter: tuple[str, ...] = ()

    def program_of(self, local_rank: int) -> Program:
        """The program of one rank, with torchrun's macro ``${local_rank}`` replaced where torchrun replaces it.

        That is in every word that it passes to Python, or to a program of another kind; a plain python has no macros.
        """
        if self.kind != "torchrun":
            return self.program
        program = self.program
        target, *args = (
            Template(word).safe_substitute(local_rank=str(local_rank)) for word in (program.target, *program.args)
        )
        return Program(program.mode, program.target if program.mode == "exec" else target, tuple(args))

    def fewest(self, replicas: int) -> int:
        """How many of a role's ``replicas`` the job needs at least: MIN of torchrun's ``--nnodes MIN:MAX``."""
        return self.options.min_nodes if self.kind == "torchrun" else replicas


def parse(argv: Sequence[str], env: Mapping[str, str] = MappingProxyType({})) -> Command | None:
    """Read a command as torchrun and CPython would.

    Args:
        argv: the command; its first word is the program.
        env: the environment it runs in: ``PET_*`` variables supply torchrun's options, PYTHON_EXEC its interpreter.

    Returns:
        None when there is no rank program in it (``echo hello``, ``python -V``, ``torchrun --help``): run it as it is.

    Raises:
        CommandError: a torchrun command that torchrun itself would not take, or ``torch.distributed.launch``.
    """
    if not argv:
        return None
    name = os.path.basename(argv[0])
    if name == "torchrun":
        return _torchrun(argv[1:], env, interpreter=())
    if not _PYTHON.fullmatch(name):
        return None
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


def _torchrun(arguments: Sequence[str], env: Mapping[str, str], interpreter: tuple[str, ...]) -> Command | None:
    try:
        options, target, args = parse_options(arguments, env)
    except HelpRequested:
        return None
    mode: Literal["script", "module", "exec"]
    # As in torchrun, --run-path takes precedence over the other two.
    mode = "script" if options.run_path else "exec" if options.no_python else "module" if options.module else "script"
    if "PYTHON_EXEC" in env:
        interpreter = (env["PYTHON_EXEC"],)
    return Command("torchrun", options, Program(mode, target, args), interpreter)


def _python(argv: Sequence[str]) -> tuple[tuple[str, ...], Program] | None:
    """Split a python command into the interpreter with its flags and the program; None when it runs no program.

    The flags are read as CPython reads them: letters may be joined (``-um mod``), a value may be joined or follow.
    Anything that CPython answers itself (``-V``, ``--help``, an unknown flag) or reads from a terminal (``-``, ``-i``)
    is no program for a rank.
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


def check(command: Command, *, replicas: int, role: str) -> None:
    """Refuse what cannot be run, or not yet, before anything is started.

    Options whose value a shell has yet to expand are not judged; the host judges them.

    Args:
        command: what :func:`parse` returned.
        replicas: the role's number of replicas: the nodes that torchrun's ``--nnodes`` speaks of.
        role: the role's name, for the message.

    Raises:
        CommandError: naming the role, the option, its value and what to use instead.
    """
    if command.kind == "torchrun":
        reason = _contradiction(command.options, replicas) or _unsupported(command.options)
        if reason is not None:
            raise CommandError(f"role {role!r}: {reason}")


def _contradiction(options: TorchrunOptions, replicas: int) -> str | None:
    if options.no_python and options.module and not options.run_path:
        return "torchrun options --no-python and --module contradict each other. Leave one out."
    if options.standalone and replicas > 1:
        return (
            f"torchrun option --standalone is for one node, but the role has {replicas} replicas. "
            f"Leave it out and use --nnodes={replicas}."
        )
    if "nnodes" not in options.unexpanded and not options.min_nodes <= replicas <= options.max_nodes:
        return (
            f"torchrun option --nnodes={_nnodes(options)} does not agree with the role's {replicas} replicas. "
            f"Use --nnodes={replicas}, or change the replicas of the role."
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
            f"Use a number above 0, or one of {', '.join(PROCESS_COUNTS)}."
        )
    return None


def _unsupported(options: TorchrunOptions) -> str | None:
    for option in OPTIONS:
        if option.use is Use.REFUSED:
            value = getattr(options, option.dest)
            if value != getattr(DEFAULTS, option.dest):
                return f"torchrun option {_typed(option, value)} is not supported: {option.why}."
    return None


def _nnodes(options: TorchrunOptions) -> str:
    low, high = options.min_nodes, options.max_nodes
    return str(low) if low == high else f"{low}:{high}"


def is_process_count(text: str) -> bool:
    try:
        return int(text) > 0
    except ValueError:
        return text in PROCESS_COUNTS


def _typed(option: Option, value: object) -> str:
    if option.type is bool:
        return option.name
    return f"{option.name}={','.join(value) if isinstance(value, tuple) else value}"
