# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A live allocation in a program's or a notebook's hands."""

from __future__ import annotations

import getpass
import os
import re
import shlex
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchx_monarch.client.hosts import START_TIMEOUT, Hosts, JobStatus, say
from torchx_monarch.client.result import RunResult
from torchx_monarch.client.run import Collector, Output, Records, RunHandle, interruptibly
from torchx_monarch.client.target import Target
from torchx_monarch.client.workspace_sync import SyncResult, When, check_when, sync_workspace
from torchx_monarch.exceptions import SPMDError, UnreachableError
from torchx_monarch.system.line_output import LineReader

if TYPE_CHECKING:
    from torchx.runner import Runner

_COMMAND = re.compile(r"torchrun|python(3(\.\d+)?)?")


def words_of(command: str | Sequence[str]) -> list[str]:
    """The words of a command; a text is split as a shell would.

    Raises:
        ValueError: a quotation in the text does not end.
    """
    if not isinstance(command, str):
        return [str(word) for word in command]
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ValueError(f"{error} in {command!r}") from None


class SPMDJob:
    """Hosts that wait for runs: one role of an app. A context manager, which gives them back at its end.

    Whatever needs the hosts waits for them and says so on stderr, and raises ``AllocationError`` once they have ended.

    Attributes:
        hosts: how they are reached.

    Args:
        handle: of the app.
        role: which of its roles; empty for the first.
        address: ``HOST:PORT`` where its replica 0 is reached from here, where the scheduler cannot say.
        runner: TorchX's; one is made where none is given.
        workspace: folder with the code, which the hosts are to have as it is when a run begins; None for what is there.
        sync: when they get a copy; see ``client.workspace_sync.When``.
        start_timeout: seconds that anything waits for hosts which are not there yet; None for no limit.
    """

    def __init__(
        self,
        handle: str,
        role: str = "",
        address: str = "",
        runner: Runner | None = None,
        workspace: str | None = None,
        sync: When = "auto",
        start_timeout: float | None = START_TIMEOUT,
    ) -> None:
        check_when(sync)
        self.handle = handle
        self.role = role
        self.workspace = os.path.abspath(os.path.expanduser(workspace)) if workspace else None
        self.sync: When = sync
        self.hosts = Hosts(handle, role, address, runner, start_timeout)

    @classmethod
    def attach(cls, handle: str, role: str = "", address: str = "", **more: Any) -> SPMDJob:
        """The allocation of that handle, from any process.

        Args:
            handle: as for ``SPMDJob``, and so are ``runner``, ``workspace``, ``sync`` and ``start_timeout``.

        Raises:
            UnreachableError: it is not known here how to reach it, and waiting does not help.
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

    def status(self) -> JobStatus:
        """What its hosts say, or where they cannot be reached its scheduler."""
        return self.hosts.status()

    def wait_ready(
        self,
        timeout: float | None = START_TIMEOUT,
        on_progress: Callable[[str], None] | None = None,
        warm: bool = False,
    ) -> SPMDJob:
        """Wait until runs can begin at once.

        Args:
            timeout: seconds; None for no limit.
            on_progress: called with a line whenever what is waited for changes.
            warm: wait as well until interpreters have imported torch, so that the next run need not.

        Raises:
            AllocationError: it has ended, or is not ready in time; the message says what was waited for.
            UnreachableError: its hosts cannot be reached from here, and waiting does not help.
            RefusedError: its hosts do not answer this client.
        """
        self.hosts.wait(timeout, on_progress, warm=warm)
        return self

    @property
    def target(self) -> Target:
        """Where its replica 0 is reached.

        Raises:
            UnreachableError: that is not known here.
        """
        return self.hosts.target

    def kill(self) -> None:
        """Give the hosts back, and end what runs on them; an app that has ended is left alone."""
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
        sync: When | None = None,
        queue: bool = False,
        check: bool = True,
        on_phase: Callable[[str], None] | None = None,
    ) -> RunResult:
        """Run something on all hosts, and wait for its end. Ctrl-C stops the run and keeps the hosts; twice kills it.

        Args:
            script_args: a script with its arguments, or ``-m``, a module and its, in place of those of the command that
                the allocation was taken with; or a whole torchrun or Python command; None for that command as it is. A
                text is split as a shell would.
            env: variables that the ranks get beside those of the hosts.
            nproc: processes on each host, where not as the command says: a number, or auto, gpu, cpu, xpu.
            timeout: seconds after which the hosts end the run.
            output: what happens to what the ranks print; see ``client.run.Output``.
            cwd: folder on the hosts that the ranks start in, as it is there; None for the workspace, or without one
                the hosts' own.
            workspace: folder with the code for this run; None for the job's.
            sync: when the hosts get a copy of it for this run; None for the job's. See ``client.workspace_sync.When``.
            queue: wait for runs that have not ended yet; else one that has not makes this call fail.
            check: whether a failure raises; else it is in the result.
            on_phase: called with each line about the run itself.

        Raises:
            SPMDError: it has failed, or was ended.
            CodeError: the workspace was not brought to the hosts.
            RefusedError: the hosts do not run it: another run has not ended, or the request makes no sense.
            AllocationError: the hosts have ended, or are not there in time.
            UnreachableError: they cannot be reached, and waiting does not help.
        """
        request = self.request(script_args, env, nproc, timeout, cwd, queue, workspace, sync)
        records = Records.of(self.hosts, request)
        try:
            result = interruptibly(self.hosts, records, Collector(output, on_phase), say)
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
        sync: When | None = None,
        queue: bool = False,
        check: bool = True,
        on_phase: Callable[[str], None] | None = None,
    ) -> RunHandle:
        """As ``run_spmd``, without waiting for the end; the run goes on when this process ends.

        Raises:
            CodeError: the workspace was not brought to the hosts.
            RefusedError: the hosts do not run it: another run has not ended, or the request makes no sense.
            AllocationError: the hosts have ended, or are not there in time.
            UnreachableError: they cannot be reached, and waiting does not help.
        """
        request = self.request(script_args, env, nproc, timeout, cwd, queue, workspace, sync)
        records = Records.of(self.hosts, request)
        return RunHandle(self.hosts, records, Collector(output, on_phase), check)

    def follow(self, run: int | None = None, *, output: Output = "stream", check: bool = True) -> RunHandle:
        """A run that somebody else has begun, or the last one: its output from the start, and its result.

        Args:
            run: its number; None for the one that is going on, or else the last.
            output: what happens to what the ranks print.
            check: whether a failure is an exception of the handle.

        Raises:
            RefusedError: there is none.
            AllocationError: the hosts have ended, or are not there in time.
            UnreachableError: they cannot be reached, and waiting does not help.
        """
        records = Records.of(self.hosts, {"type": "follow", "run": run})
        return RunHandle(self.hosts, records, Collector(output), check)

    def runs(self) -> list[dict[str, Any]]:
        """The runs that the hosts know, the eldest first: number, state, command, who, when, exit code, reason.

        Raises:
            AllocationError: the hosts have ended, or are not there in time.
            UnreachableError: they cannot be reached, and waiting does not help.
        """
        found: list[dict[str, Any]] = []
        with self.hosts.open({"type": "runs"}) as link:
            while (answer := link.receive()) is not None:
                found += answer["runs"]
                if not answer["more"]:
                    break
        return found

    def end_run(self, run: int | None = None, kill: bool = False) -> None:
        """Stop a run, and keep the hosts; returns at once.

        Args:
            run: its number; None for the one that is going on.
            kill: do not wait for the ranks' grace.

        Raises:
            RefusedError: there is none.
            AllocationError: the hosts have ended, or are not there in time.
            UnreachableError: they cannot be reached, and waiting does not help.
        """
        self.hosts.ask({"type": "end-run", "run": run, "kill": kill})

    def logs(self, rank: int | None = None, follow: bool = False, run: int | None = None) -> Iterator[str]:
        """The lines that the ranks of a run have printed, in the order in which they came.

        Args:
            rank: of one rank alone; None for all.
            follow: go on to the end of the run; else to what is there now.
            run: its number; None for the one that is going on, or else the last.

        Raises:
            RefusedError: there is no such run, or it has no such rank.
            AllocationError: the hosts have ended, or are not there in time.
            UnreachableError: they cannot be reached, and waiting does not help.
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
        sync: When | None = None,
    ) -> dict[str, Any]:
        """What is sent for ``run_spmd`` with these arguments; the code that it needs is there by then."""
        words = words_of(script_args) if script_args is not None else None
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

    def _sync_workspace(self, workspace: str | None, sync: When | None) -> SyncResult:
        """Have the hosts see the workspace as it is now, if there is one."""
        folder = os.path.abspath(os.path.expanduser(workspace)) if workspace else self.workspace
        when = self.sync if sync is None else sync
        check_when(when)
        if folder is None:
            return SyncResult()
        return self.hosts.reach(lambda target: sync_workspace(target, folder, when), ready=True)
