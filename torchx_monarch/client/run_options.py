# SPDX-License-Identifier: BSD-3-Clause
"""The options of a run on a live allocation, and the request with which a client submits it."""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict, get_args

from torchx_monarch.client.hosts import Hosts
from torchx_monarch.client.workspace_sync import SyncMode, sync_workspace
from torchx_monarch.command.command import PROCESS_COUNT, is_command, is_process_count
from torchx_monarch.function import Encoding
from torchx_monarch.model.run_request import RunRequest
from torchx_monarch.model.spelling import did_you_mean
from torchx_monarch.system.processes import user_name

Output = Literal["stream", "store", "none"] | Callable[[int, str, str], None]
"""Where the output of the ranks goes. ``stream``: to ``sys.stdout`` and ``sys.stderr``; ``store``: to
``RunResult.output``; ``none``: nowhere. A function is called with the rank, ``stdout`` or ``stderr``, and the text."""


class RunOptionsDict(TypedDict, total=False):
    """The fields of ``RunOptions`` as keyword arguments.

    Type checkers need them declared in this form too. A test compares both declarations.
    """

    env: Mapping[str, str] | None
    nproc: int | str | None
    timeout: float | None
    output: Output
    cwd: str | None
    workspace: str | None
    sync: SyncMode | None
    queue: bool
    results: Encoding
    check: bool
    on_phase: Callable[[str], None] | None


@dataclass(frozen=True)
class RunOptions:
    """The options of ``SPMDJob.run_spmd`` and ``run_spmd_async``, as one value that several runs can share::

        options = RunOptions(output="store", timeout=600)
        job.run_spmd(options=options)
        job.run_spmd(["train.py", "--lr", "0.2"], options=options, env={"SPLIT": "test"})

    Attributes:
        env: environment variables of the ranks, in addition to those of the hosts; None for no others.
        nproc: processes per host: a number, ``auto``, ``gpu``, ``cpu`` or ``xpu``; None for the command's number.
        timeout: seconds after which the hosts end the run; None for no limit.
        output: where the output of the ranks goes; see ``Output``.
        cwd: folder on the hosts in which the ranks start; no code is sent. None for the workspace or, without a
            workspace, the working directory of the host process.
        workspace: folder with the code for this run; None for the job's workspace.
        sync: when the hosts get a copy of the workspace for this run, see ``SyncMode``; None for the job's setting.
        queue: whether to wait for the end of earlier runs. Otherwise the hosts refuse the run if another one is active.
        results: how what a function returns travels here; see ``torchx_monarch.function.Encoding``. Not for programs.
        check: whether a failed run raises ``SPMDError``. Otherwise the failure is in the result.
        on_phase: called with each progress line of the run, such as its start and its attempts; None to drop them.

    Raises:
        ValueError: both ``cwd`` and ``workspace`` are given, or a field has an invalid value.
    """

    env: Mapping[str, str] | None = None
    nproc: int | str | None = None
    timeout: float | None = None
    output: Output = "stream"
    cwd: str | None = None
    workspace: str | None = None
    sync: SyncMode | None = None
    queue: bool = False
    results: Encoding = "pickle"
    check: bool = True
    on_phase: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        check_output(self.output)
        for name, value, allowed in (("sync", self.sync or "auto", SyncMode), ("results", self.results, Encoding)):
            if value not in get_args(allowed):
                raise ValueError(f"{name}={value!r} is none of {', '.join(get_args(allowed))}")
        check_env(self.env)
        if self.nproc is not None and not is_process_count(str(self.nproc)):
            raise ValueError(f"nproc={self.nproc!r}: give {PROCESS_COUNT}")
        if self.timeout is not None:
            is_number = isinstance(self.timeout, (int, float)) and not isinstance(self.timeout, bool)
            if not is_number or not 0 < self.timeout < math.inf:
                raise ValueError(f"timeout={self.timeout!r}: give a number of seconds above 0, or None for no limit")
        if self.cwd and self.workspace:
            raise ValueError(
                f"give cwd={self.cwd!r}, a folder that the hosts have, or workspace={self.workspace!r}, not both"
            )
        if self.workspace and not os.path.isdir(os.path.expanduser(self.workspace)):
            raise ValueError(f"workspace={self.workspace!r}: there is no such folder")


def merge_options(options: RunOptions | None, changes: RunOptionsDict) -> RunOptions:
    """Return options, for None the defaults, with changes; raise a TypeError for another object or an unknown name."""
    if not isinstance(options or RunOptions(), RunOptions):
        raise TypeError(f"options={options!r:.200}: give RunOptions(...)")
    names = [field.name for field in dataclasses.fields(RunOptions)]
    for name in changes:
        if name not in names:
            raise TypeError(f"a run has no option {name}.{did_you_mean(name, names)}")
    return dataclasses.replace(options or RunOptions(), **changes)


def check_output(output: Output) -> None:
    """Raise a ValueError, which lists the values, if a value is no ``Output``."""
    if not callable(output) and output not in ("stream", "store", "none"):
        raise ValueError(f"output={output!r}: use 'stream', 'store', 'none' or a function of rank, stream and text")


def check_env(env: Mapping[str, str] | None) -> None:
    """Raise a ValueError if variables for ranks or actors are no dict, or have no value."""
    if not isinstance(env or {}, Mapping):
        raise ValueError(f"env={env!r}: give a dict, such as {{'A': '1'}}")
    for name, value in (env or {}).items():
        if value is None:
            raise ValueError(f"env={{{name!r}: None}}: give a text, such as '' for an empty value, or leave it out")


def split_command(command: str | Sequence[str]) -> list[str]:
    """Return the words of a command. A string is split as a shell splits it; a ValueError says why it cannot be."""
    if not isinstance(command, str):
        return [str(word) for word in command]
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ValueError(f"{error} in {command!r}") from None


def run_request(script_args: str | Sequence[str] | None, options: RunOptions) -> RunRequest:
    """Return the request for a run, without the code that it needs (``send_code``).

    Raises:
        ValueError: ``script_args`` is empty or has an unclosed quotation, or the hosts would refuse the request.
    """
    words = split_command(script_args) if script_args is not None else None
    if words == []:
        raise ValueError("script_args is empty; None runs the allocation's own command")
    whole = words is not None and is_command(words[0])
    request = RunRequest(
        command=tuple(words) if words and whole else None,
        program=tuple(words) if words and not whole else None,
        nproc="" if options.nproc is None else str(options.nproc),
        env={name: str(value) for name, value in (options.env or {}).items()},
        cwd=options.cwd or "",
        timeout=options.timeout,
        queue=options.queue,
        by=f"{user_name()}@{socket.gethostname()}",
    )
    request.check()
    return request


def send_code(hosts: Hosts, request: RunRequest, options: RunOptions) -> RunRequest:
    """Give hosts that are ready the current state of the workspace, and return the request for a run with it.

    Raises:
        CodeError: the workspace could not be sent to the hosts.
    """
    if not options.workspace:
        return request
    folder, when = os.path.expanduser(options.workspace), options.sync or "auto"
    code = hosts.reach(lambda target: sync_workspace(target, folder, when))
    return dataclasses.replace(request, workspace=f"{request.by}:{os.path.realpath(folder)}", **code)
