# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The Python API of a live allocation, for programs and notebooks."""

from __future__ import annotations

import getpass
import os
import re
import shlex
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchx_monarch.client.hosts import START_TIMEOUT, AllocationStatus, Hosts, say
from torchx_monarch.client.result import RunResult
from torchx_monarch.client.run import Collector, Output, Records, RunHandle, collect_with_interrupts
from torchx_monarch.client.target import Target
from torchx_monarch.client.workspace_sync import SyncMode, SyncResult, check_when, sync_workspace
from torchx_monarch.exceptions import SPMDError, UnreachableError
from torchx_monarch.system.line_output import LineReader

if TYPE_CHECKING:
    from torchx.runner import Runner

_COMMAND = re.compile(r"torchrun|python(3(\.\d+)?)?")


def split_command(command: str | Sequence[str]) -> list[str]:
    """Return the words of a command. A string is split as a shell splits it.

    Raises:
        ValueError: the string has an unclosed quotation.
    """
    if not isinstance(command, str):
        return [str(word) for word in command]
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ValueError(f"{error} in {command!r}") from None


class SPMDJob:
    """Represent a live allocation: the hosts of one role, which wait for runs.

    ``serve`` takes new hosts and returns an ``SPMDJob``; ``SPMDJob.attach`` returns one for hosts that were taken
    elsewhere. As a context manager, it releases the hosts on exit::

        with serve("torchrun --nproc-per-node 4 train.py", scheduler="monarch_slurm") as job:
            job.run_spmd()
            job.run_spmd(["train.py", "--lr", "0.2"])

    Methods that need the hosts wait for them to start and print the reason for waiting on stderr. They raise
    ``AllocationError`` if the hosts have ended. An ``SPMDJob`` can be pickled and used in another process.

    Attributes:
        handle: the app's TorchX handle.
        role: name of the role; empty for the first role.
        workspace: absolute path of the folder with the code; None if the hosts use the code that they have.
        sync: when the hosts get a copy of the workspace.
        hosts: the client that sends requests to the hosts.

    Args:
        handle: the app's TorchX handle, ``SCHEDULER://SESSION/APP``, as ``torchx run`` prints it.
        role: name of the role; empty for the first role.
        address: ``HOST:PORT`` at which this machine reaches replica 0, such as the local end of a tunnel; empty to ask
            the scheduler.
        runner: the TorchX runner; None to create one when it is needed.
        workspace: folder with the code. Each run uses its state at the start of the run. None to use the code that the
            hosts have.
        sync: when the hosts get a copy of the workspace; see ``client.workspace_sync.SyncMode``.
        start_timeout: seconds that a method waits for hosts that have not started; None for no limit.

    Raises:
        ValueError: ``sync`` is not a value of ``client.workspace_sync.SyncMode``.
    """

    def __init__(
        self,
        handle: str,
        role: str = "",
        address: str = "",
        runner: Runner | None = None,
        workspace: str | None = None,
        sync: SyncMode = "auto",
        start_timeout: float | None = START_TIMEOUT,
    ) -> None:
        check_when(sync)
        self.handle = handle
        self.role = role
        self.workspace = os.path.abspath(os.path.expanduser(workspace)) if workspace else None
        self.sync: SyncMode = sync
        self.hosts = Hosts(handle, role, address, runner, start_timeout)

    @classmethod
    def attach(cls, handle: str, role: str = "", address: str = "", **more: Any) -> SPMDJob:
        """Return the allocation with this handle, from any process on a machine that can reach its hosts.

        Args:
            handle: the app's TorchX handle.
            role: name of the role; empty for the first role.
            address: ``HOST:PORT`` at which this machine reaches replica 0; empty to ask the scheduler.
            **more: ``runner``, ``workspace``, ``sync`` and ``start_timeout``, as for ``SPMDJob``.

        Raises:
            UnreachableError: this machine cannot reach the allocation, and waiting does not help: it has no certificate
                for the app, or the app has no such role.
            ValueError: ``sync`` is not a value of ``client.workspace_sync.SyncMode``.
        """
        job = cls(handle, role, address, **more)
        try:
            job.target  # noqa: B018
        except UnreachableError as error:
            if error.final:
                raise
        return job

    def __repr__(self) -> str:
        return f"<SPMDJob {self.handle}>"

    def __enter__(self) -> SPMDJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    # -- the allocation ------------------------------------------------------------------------------------------------

    def status(self) -> AllocationStatus:
        """Return the state of the allocation, from its hosts or, if they cannot be reached, from its scheduler."""
        return self.hosts.status()

    def wait_ready(
        self,
        timeout: float | None = START_TIMEOUT,
        on_progress: Callable[[str], None] | None = None,
        warm: bool = False,
    ) -> SPMDJob:
        """Wait until a run can start immediately.

        Args:
            timeout: seconds; None for no limit.
            on_progress: called with a line each time the reason for waiting changes; None for no progress lines.
            warm: whether to wait until spare interpreters have imported torch, which saves the next run the import.

        Returns:
            This job.

        Raises:
            AllocationError: the hosts have ended, or are not ready in time; the message gives the reason.
            UnreachableError: the hosts cannot be reached, and waiting does not help.
            RefusedError: the hosts refuse this client.
        """
        self.hosts.wait(timeout, on_progress, warm=warm)
        return self

    @property
    def target(self) -> Target:
        """The address and credentials of replica 0.

        Raises:
            UnreachableError: this machine has no address or certificate for replica 0, or ``kill`` was called.
        """
        return self.hosts.target

    def kill(self) -> None:
        """Release the hosts and end their runs, by cancelling the app. Does nothing if the app has ended."""
        self.hosts.kill()

    # -- runs ----------------------------------------------------------------------------------------------------------

    def run_spmd(
        self,
        script_args: str | Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        nproc: int | str | None = None,
        timeout: float | None = None,
        *,
        output: Output = "stream",
        cwd: str | None = None,
        workspace: str | None = None,
        sync: SyncMode | None = None,
        queue: bool = False,
        check: bool = True,
        on_phase: Callable[[str], None] | None = None,
    ) -> RunResult:
        """Execute a command on all hosts, and wait for its end.

        Ctrl-C stops the run and keeps the hosts; a second Ctrl-C kills the run. Both raise ``KeyboardInterrupt`` when
        the run has ended. A third Ctrl-C raises it immediately and leaves the run alone.

        Args:
            script_args: what to run, as a list of words or as a string that is split as a shell splits it. One of:
                a script and its arguments, or ``-m``, a module and its arguments, which replace the program of the
                allocation's command and keep its torchrun options; a whole torchrun or Python command; or None for the
                allocation's command unchanged.
            env: environment variables of the ranks, in addition to those of the hosts; None for no others.
            nproc: processes per host: a number, ``auto``, ``gpu``, ``cpu`` or ``xpu``; None for the command's number.
            timeout: seconds after which the hosts end the run; None for no limit.
            output: where the output of the ranks goes; see ``client.run.Output``.
            cwd: folder on the hosts in which the ranks start; no code is sent. None for the workspace or, without a
                workspace, the working directory of the host process.
            workspace: folder with the code for this run; None for the job's workspace.
            sync: when the hosts get a copy of the workspace for this run; None for the job's setting. See
                ``client.workspace_sync.SyncMode``.
            queue: whether to wait for the end of earlier runs. Otherwise the hosts refuse the run if another one is
                active.
            check: whether a failed run raises ``SPMDError``. Otherwise the failure is in the result.
            on_phase: called with each progress line of the run, such as its start and its attempts; None to drop them.

        Returns:
            The result of the run, with the exit code of each rank.

        Raises:
            SPMDError: the run failed or was stopped, and ``check`` is True.
            CodeError: the workspace could not be sent to the hosts.
            RefusedError: the hosts do not accept the run: another run is active, or the request is invalid.
            AllocationError: the hosts have ended, or did not start within ``start_timeout``.
            UnreachableError: the hosts cannot be reached, and waiting does not help.
            KeyboardInterrupt: the user pressed Ctrl-C.
            ValueError: ``script_args`` is empty or has an unclosed quotation, both ``cwd`` and ``workspace`` are given,
                or ``output`` or ``sync`` has a value that does not exist.
        """
        request = self.request(script_args, env, nproc, timeout, cwd, queue, workspace, sync)
        records = Records.of(self.hosts, request)
        try:
            result = collect_with_interrupts(self.hosts, records, Collector(output, on_phase), say)
        finally:
            records.close()
        if check and result.exit_code != 0:
            raise SPMDError(result)
        return result

    def run_spmd_async(
        self,
        script_args: str | Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        nproc: int | str | None = None,
        timeout: float | None = None,
        *,
        output: Output = "stream",
        cwd: str | None = None,
        workspace: str | None = None,
        sync: SyncMode | None = None,
        queue: bool = False,
        check: bool = True,
        on_phase: Callable[[str], None] | None = None,
    ) -> RunHandle:
        """Start a run on all hosts, and return a handle to it without waiting for its end.

        The arguments are those of ``run_spmd``. The run continues if this process ends; ``follow`` finds it again.

        Returns:
            A handle like ``concurrent.futures.Future``. With ``check``, its ``result`` raises ``SPMDError`` if the run
            failed.

        Raises:
            CodeError: the workspace could not be sent to the hosts.
            RefusedError: the hosts do not accept the run: another run is active, or the request is invalid.
            AllocationError: the hosts have ended, or did not start within ``start_timeout``.
            UnreachableError: the hosts cannot be reached, and waiting does not help.
            ValueError: an argument is invalid, as for ``run_spmd``.
        """
        request = self.request(script_args, env, nproc, timeout, cwd, queue, workspace, sync)
        records = Records.of(self.hosts, request)
        return RunHandle(self.hosts, records, Collector(output, on_phase), check)

    def follow(self, run: int | None = None, *, output: Output = "stream", check: bool = True) -> RunHandle:
        """Follow a run that any process has started: receive its output from the beginning, and its result.

        Args:
            run: number of the run; None for the current run or, if no run is active, the last one.
            output: where the output of the ranks goes; see ``client.run.Output``.
            check: whether the handle's ``result`` raises ``SPMDError`` if the run failed.

        Raises:
            RefusedError: the hosts do not know this run.
            AllocationError: the hosts have ended, or did not start within ``start_timeout``.
            UnreachableError: the hosts cannot be reached, and waiting does not help.
        """
        records = Records.of(self.hosts, {"type": "follow", "run": run})
        return RunHandle(self.hosts, records, Collector(output), check)

    def runs(self) -> list[dict[str, Any]]:
        """List the runs that the hosts know, the ended ones first, then the current one and the queue.

        Returns:
            A dictionary for each run: its number (``run``), state, command, submitter (``by``), times, exit code and
            reason, among others (``controller.run_queue.Run.to_json``).

        Raises:
            AllocationError: the hosts have ended, or did not start within ``start_timeout``.
            UnreachableError: the hosts cannot be reached, and waiting does not help.
        """
        found: list[dict[str, Any]] = []
        with self.hosts.open({"type": "runs"}) as link:
            while (answer := link.receive()) is not None:
                found += answer["runs"]
                if not answer["more"]:
                    break
        return found

    def end_run(self, run: int | None = None, kill: bool = False) -> None:
        """Stop a run, and keep the hosts. Does not wait for the end of the run.

        Args:
            run: number of the run; None for the current run.
            kill: whether to send the ranks SIGKILL immediately, instead of SIGTERM and SIGKILL after the grace period.

        Raises:
            RefusedError: the hosts do not know this run.
            AllocationError: the hosts have ended, or did not start within ``start_timeout``.
            UnreachableError: the hosts cannot be reached, and waiting does not help.
        """
        self.hosts.ask({"type": "end-run", "run": run, "kill": kill})

    def logs(self, rank: int | None = None, follow: bool = False, run: int | None = None) -> Iterator[str]:
        """Yield the lines that the ranks of a run printed on stdout and stderr, in the order of their arrival.

        Args:
            rank: global rank whose lines to yield; None for all ranks.
            follow: whether to wait for new lines until the run ends. Otherwise yield the lines printed so far.
            run: number of the run; None for the current run or, if no run is active, the last one.

        Raises:
            RefusedError: the hosts do not know this run, or it has no such rank.
            AllocationError: the hosts have ended, or did not start within ``start_timeout``.
            UnreachableError: the hosts cannot be reached, and waiting does not help.
        """
        greeting = {"type": "follow", "run": run, "rank": rank, "wait": follow}
        readers: dict[tuple[int, str], LineReader] = {}
        with self.hosts.open(greeting) as link:
            while (record := link.receive(None)) is not None and record["type"] != "result":
                if record["type"] == "output":
                    reader = readers.setdefault((record["rank"], record["stream"]), LineReader())
                    for line in reader.feed(record["text"].encode(errors="surrogateescape")):
                        yield line.decode(errors="replace").removesuffix("\n")
        for reader in readers.values():
            if rest := reader.rest():
                yield rest.decode(errors="replace")

    def request(
        self,
        script_args: str | Sequence[str] | None,
        env: Mapping[str, str] | None,
        nproc: int | str | None,
        timeout: float | None,
        cwd: str | None,
        queue: bool,
        workspace: str | None = None,
        sync: SyncMode | None = None,
    ) -> dict[str, Any]:
        """Synchronise the workspace, and return the ``run`` message for these arguments of ``run_spmd``.

        Raises:
            ValueError: ``script_args`` is empty or has an unclosed quotation, both ``cwd`` and ``workspace`` are given,
                or ``sync`` has a value that does not exist.
        """
        words = split_command(script_args) if script_args is not None else None
        if words == []:
            raise ValueError("script_args is empty; None runs the allocation's own command")
        whole = words is not None and _COMMAND.fullmatch(os.path.basename(words[0])) is not None
        request: dict[str, Any] = {
            "type": "run",
            "command": words if whole else None,
            "program": None if whole else words,
            "env": {name: str(value) for name, value in (env or {}).items()},
            "nproc": "" if nproc is None else str(nproc),
            "timeout": timeout,
            "cwd": cwd or "",
            "queue": queue,
            "by": f"{getpass.getuser()}@{socket.gethostname()}",
        }
        if not cwd:
            request.update(self._sync_workspace(workspace, sync).request())
        elif workspace:
            raise ValueError(f"give cwd={cwd!r}, a folder that the hosts have, or workspace={workspace!r}, not both")
        return request

    def _sync_workspace(self, workspace: str | None, sync: SyncMode | None) -> SyncResult:
        """Give the hosts the current state of the workspace; do nothing if the job has no workspace."""
        folder = os.path.abspath(os.path.expanduser(workspace)) if workspace else self.workspace
        when = self.sync if sync is None else sync
        check_when(when)
        if folder is None:
            return SyncResult()
        return self.hosts.reach(lambda target: sync_workspace(target, folder, when), ready=True)
