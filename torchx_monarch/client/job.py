# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A live allocation in a program's or a notebook's hands."""

from __future__ import annotations

import dataclasses
import getpass
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchx_monarch.client.code import Brought, When, bring, check_when
from torchx_monarch.client.link import Link, ask
from torchx_monarch.client.result import RunResult
from torchx_monarch.client.run import Collector, Output, Records, RunHandle, interruptibly
from torchx_monarch.client.target import Target
from torchx_monarch.errors import AllocationError, LinkError, RefusedError, SPMDError

if TYPE_CHECKING:
    from torchx.runner import Runner

_POLL = 0.05
"""Seconds between two looks at hosts that are not ready."""

_POLL_AT_MOST = 2.0

_ASK_SCHEDULER_EVERY = 5.0
"""Seconds; it serves everybody."""

_SAY_WHY_AFTER = 5.0
"""Seconds of waiting until it is said why hosts that run are not reached: they may be about to listen."""


def _say(text: str) -> None:
    print(f"[monarch] {text}", file=sys.stderr, flush=True)


_COMMAND = re.compile(r"torchrun|python(3(\.\d+)?)?")


@dataclasses.dataclass(frozen=True)
class JobStatus:
    """A live allocation.

    Attributes:
        state: TorchX's name of the app's state.
        ready: whether runs can begin at once.
        hosts: names of the machines that have come, by replica.
        missing: replicas that have not.
        run: the run that is going on; None for none.
        runs: how many have ended.
        warm: interpreters of the first host that wait with torch imported.
        idle: seconds since the last run.
        idle_timeout: after how many of them the hosts end; 0 for never.
        message: why it cannot be reached, or what its scheduler says of its end.
    """

    state: str
    ready: bool = False
    hosts: Mapping[int, str] = dataclasses.field(default_factory=dict)
    missing: Sequence[int] = ()
    run: int | None = None
    runs: int = 0
    warm: int = 0
    idle: float = 0.0
    idle_timeout: float = 0.0
    message: str = ""


class SPMDJob:
    """Hosts that wait for runs: one role of an app. A context manager, which gives them back at its end.

    Args:
        handle: of the app.
        role: which of its roles; empty for the first.
        address: ``HOST:PORT`` where its replica 0 is reached from here, where the scheduler cannot say.
        runner: TorchX's; one is made where none is given.
        workspace: folder with the code, which the hosts are to have as it is when a run begins; None for what is there.
        sync: when they get a copy; see ``client.code.When``.
    """

    def __init__(
        self,
        handle: str,
        role: str = "",
        address: str = "",
        runner: Runner | None = None,
        workspace: str | None = None,
        sync: When = "auto",
    ) -> None:
        check_when(sync)
        self.handle = handle
        self.role = role
        self.workspace = os.path.abspath(os.path.expanduser(workspace)) if workspace else None
        self.sync: When = sync
        self._address = address
        self._runner = runner
        self._target: Target | None = None
        self._unreached = ""

    @classmethod
    def attach(cls, handle: str, role: str = "", address: str = "", **more: Any) -> SPMDJob:
        """The allocation of that handle, from any process.

        Args:
            handle: as for ``SPMDJob``; likewise the others: ``runner``, ``workspace``, ``sync``.

        Raises:
            LinkError: it is not known here how to reach it.
        """
        job = cls(handle, role, address, **more)
        job._target = Target.of(handle, role, address, job._runner)
        return job

    def __repr__(self) -> str:
        return f"<SPMDJob {self.handle}>"

    def __enter__(self) -> SPMDJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_runner": None, "_target": None}

    # -- the allocation ------------------------------------------------------------------------------------------------

    def status(self) -> JobStatus:
        """What its hosts say, or where they cannot be reached its scheduler."""
        try:
            answer = ask(self.target, {"type": "look"})
        except (LinkError, RefusedError) as error:
            self._target = None  # a host that was replaced may be elsewhere
            # Where it must be said how to reach the hosts, their scheduler is out of reach as well.
            state, message = self._scheduler_status() if not self._address else ("UNKNOWN", "")
            return JobStatus(state, message=message or str(error))
        live = answer.get("live")
        if live is None:
            return JobStatus("RUNNING", message=f"{self.handle} is no allocation that waits for runs")
        return JobStatus(
            state="RUNNING",
            ready=live["ready"],
            hosts={host["replica"]: host["hostname"] for host in answer["hosts"]},
            missing=answer["missing"],
            run=live["run"],
            runs=live["runs"],
            warm=live["warm"],
            idle=live["idle"],
            idle_timeout=live["idle_timeout"],
        )

    def wait_ready(
        self,
        timeout: float | None = 600.0,
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
        """
        started, pause, said, asked = time.monotonic(), _POLL, "", -_ASK_SCHEDULER_EVERY
        waiting = "the hosts"
        while True:
            status = self._glance()
            if status is not None and status.ready and (status.warm or not warm):
                return self
            if status is not None and status.message:
                raise AllocationError(status.message)
            if status is not None:
                waiting = f"hosts {', '.join(map(str, status.missing))}" if status.missing else "the mesh"
                waiting = "the interpreters" if status.ready else waiting
            elif self._address:
                waiting = f"an answer at {self._address}"
            elif time.monotonic() > asked + _ASK_SCHEDULER_EVERY:
                asked = time.monotonic()
                state, message = self._scheduler_status()
                if state == "UNKNOWN" and message:
                    raise AllocationError(message)
                if state in ("SUCCEEDED", "FAILED", "CANCELLED"):
                    raise AllocationError(f"{self.handle} has ended ({state}){': ' + message if message else ''}")
                waiting = f"the hosts ({state})"
                if state == "RUNNING" and asked > started + _SAY_WHY_AFTER:
                    waiting += f": {self._unreached}"
            if waiting != said and on_progress is not None:
                on_progress(f"waiting for {waiting}")
            said = waiting
            if timeout is not None and time.monotonic() > started + timeout:
                raise AllocationError(f"{self.handle} is not ready after {timeout:g} s: waiting for {said}")
            time.sleep(pause)
            pause = min(pause * 1.2, _POLL_AT_MOST)

    def _glance(self) -> JobStatus | None:
        """What its hosts say; None where they cannot be reached."""
        try:
            answer = ask(self.target, {"type": "look"})
        except (LinkError, RefusedError) as error:
            self._unreached = str(error)
            self._target = None  # a host that was replaced may be elsewhere
            return None
        live = answer.get("live")
        if live is None:
            return JobStatus("RUNNING", message=f"{self.handle} is no allocation that waits for runs")
        return JobStatus("RUNNING", ready=live["ready"], missing=answer["missing"], warm=live["warm"])

    def _scheduler_status(self) -> tuple[str, str]:
        """The app's state by its scheduler, and why it has ended."""
        from torchx.specs import NONE  # half of what torchx costs to import; a run on hosts that live needs none of it

        status = self._torchx().status(self.handle)
        if status is None:
            return "UNKNOWN", f"{self.handle} does not exist"
        said = status.is_terminal() and status.msg != NONE
        return str(status.state.name), status.msg if said else ""

    def _torchx(self) -> Runner:
        if self._runner is None:
            from torchx.runner import get_runner

            self._runner = get_runner()
        return self._runner

    @property
    def target(self) -> Target:
        """Where its replica 0 is reached.

        Raises:
            LinkError: that is not known here.
        """
        if self._target is None:
            self._target = Target.of(self.handle, self.role, self._address, self._runner)
        return self._target

    def kill(self) -> None:
        """Give the hosts back, and end what runs on them; an app that has ended is left alone."""
        self._torchx().cancel(self.handle)

    # -- runs ----------------------------------------------------------------------------------------------------------

    def run_spmd(
        self,
        script_args: Sequence[str] | None = None,
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
                the allocation was taken with; or a whole torchrun or Python command; None for that command as it is.
            env: variables that the ranks get beside those of the hosts.
            nproc: processes on each host, where not as the command says: a number, or auto, gpu, cpu, xpu.
            timeout: seconds after which the hosts end the run.
            output: what happens to what the ranks print; see ``client.run.Output``.
            cwd: folder on the hosts that the ranks start in, as it is there; None for the workspace, or without one
                the hosts' own.
            workspace: folder with the code for this run; None for the job's.
            sync: when the hosts get a copy of it for this run; None for the job's. See ``client.code.When``.
            queue: wait for runs that have not ended yet; else one that has not makes this call fail.
            check: whether a failure raises; else it is in the result.
            on_phase: called with each line about the run itself.

        Raises:
            SPMDError: it has failed, or was ended.
            CodeError: the workspace was not brought to the hosts.
            RefusedError: the hosts do not run it: another run has not ended, or the request makes no sense.
            LinkError: they cannot be reached.
        """
        request = self.request(script_args, env, nproc, timeout, cwd, queue, workspace, sync)
        records = Records.of(self.target, request)
        try:
            result = interruptibly(self.target, records, Collector(output, on_phase), _say)
        finally:
            records.close()
        if check and result.exit_code != 0:
            raise SPMDError(result)
        return result

    def run_spmd_async(
        self,
        script_args: Sequence[str] | None = None,
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
            LinkError: they cannot be reached.
        """
        request = self.request(script_args, env, nproc, timeout, cwd, queue, workspace, sync)
        records = Records.of(self.target, request)
        return RunHandle(self.target, records, Collector(output, on_phase), check)

    def follow(self, run: int | None = None, *, output: Output = "stream", check: bool = True) -> RunHandle:
        """A run that somebody else has begun, or the last one: its output from the start, and its result.

        Args:
            run: its number; None for the one that is going on, or else the last.
            output: what happens to what the ranks print.
            check: whether a failure is an exception of the handle.

        Raises:
            RefusedError: there is none.
            LinkError: the hosts cannot be reached.
        """
        records = Records.of(self.target, {"type": "follow", "run": run})
        return RunHandle(self.target, records, Collector(output), check)

    def runs(self) -> list[dict[str, Any]]:
        """The runs that the hosts know, the eldest first: number, state, command, who, when, exit code, reason.

        Raises:
            LinkError: they cannot be reached.
        """
        found: list[dict[str, Any]] = []
        with Link.open(self.target, {"type": "runs"}) as link:
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
            LinkError: the hosts cannot be reached.
        """
        ask(self.target, {"type": "end-run", "run": run, "kill": kill})

    def logs(self, rank: int | None = None, follow: bool = False, run: int | None = None) -> Iterator[str]:
        """The lines that the ranks of a run have printed, in the order in which they came.

        Args:
            rank: of one rank alone; None for all.
            follow: go on to the end of the run; else to what is there now.
            run: its number; None for the one that is going on, or else the last.

        Raises:
            RefusedError: there is none.
            LinkError: the hosts cannot be reached.
        """
        greeting = {"type": "follow", "run": run, "rank": rank, "wait": follow}
        with Link.open(self.target, greeting) as link:
            while (record := link.receive(None)) is not None:
                if record["type"] == "output":
                    text = record["text"].encode(errors="surrogateescape").decode(errors="replace")
                    yield from text.splitlines()
                elif record["type"] == "result":
                    return

    def request(
        self,
        script_args: Sequence[str] | None,
        env: Mapping[str, str] | None,
        nproc: int | str | None,
        timeout: float | None,
        cwd: str | None,
        queue: bool,
        workspace: str | None = None,
        sync: When | None = None,
    ) -> dict[str, Any]:
        """What is sent for ``run_spmd`` with these arguments; the code that it needs is there by then."""
        if isinstance(script_args, str):
            raise TypeError(f"script_args is the text {script_args!r}; give a list of words")
        words = [str(word) for word in script_args] if script_args is not None else None
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
            request.update(self._bring(workspace, sync).request())
        elif workspace:
            raise ValueError(f"give cwd={cwd!r}, a folder that the hosts have, or workspace={workspace!r}, not both")
        return request

    def _bring(self, workspace: str | None, sync: When | None) -> Brought:
        """Have the hosts see the workspace as it is now, if there is one."""
        folder = os.path.abspath(os.path.expanduser(workspace)) if workspace else self.workspace
        when = self.sync if sync is None else sync
        check_when(when)
        return Brought() if folder is None else bring(self.target, folder, when)
