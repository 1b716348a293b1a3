# SPDX-License-Identifier: BSD-3-Clause
"""The runs that the hosts execute, one after the other.

A batch job is a session with one run, which ends with it (``Session``). A live allocation is a session that accepts
runs until it is released or idle (``LiveSession``). ``SpmdWork`` executes the runs of either.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torchx_monarch.controller.attempts import Attempts
from torchx_monarch.controller.host_events import (
    HostEvent,
    HostEvents,
    Interrupted,
    RunEndRequested,
    StopRequested,
    concerns_hosts,
)
from torchx_monarch.controller.host_messages import (
    BeginRun,
    FinishRun,
    Request,
    RunBegun,
    RunOutput,
)
from torchx_monarch.controller.hosts import HostRefused, HostsError, JobHosts
from torchx_monarch.controller.job_options import JobOptions
from torchx_monarch.controller.rank_queries import SampleRecorder
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.controller.run_queue import RunQueue
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.job_result import JobResult

_FINISH_TIMEOUT = 30.0
"""Seconds for the hosts to send the last output of a run and to prepare for the next run."""


class Session:
    """Hold the runs that the hosts execute.

    This class is for a batch job: one run, for which the hosts are prepared when they register, and with which the
    session ends.

    Attributes:
        ends_with_mesh: whether a Monarch client that shuts the host mesh down ends the session.
    """

    ends_with_mesh = False

    def __init__(self, options: JobOptions, events: HostEvents) -> None:
        self._options = options
        self._events = events

    @property
    def running(self) -> bool:
        """Whether there is a current run."""
        return True

    async def next_run(self) -> JobResult | None:
        """Wait for a run and make it the current one; return a result if the session ends for lack of runs."""
        raise AssertionError("a batch job ends with its run")

    def set_ready(self, ready: bool) -> None:
        """Note whether the hosts are together, on a new mesh."""

    async def begin(self, hosts: list[Registration]) -> tuple[JobOptions, list[Registration]]:
        """Prepare the hosts for the current run; a repetition, on a new mesh, changes nothing on a prepared host.

        Returns:
            The options of the run, and the hosts with the number of ranks that each executes.

        Raises:
            Interrupted: an event is pending.
            HostRefused: a host cannot execute the run.
        """
        return self._options, hosts

    async def refused(self, refusal: HostRefused) -> JobResult:
        """Return the result of a run that a host has refused.

        Raises:
            Interrupted: the refusal, or what a host itself reports meanwhile, ends the job.
        """
        reason = (refusal.refusal.reason.splitlines() or ["refused"])[0]
        if refusal.own:
            raise Interrupted(StopRequested(0, JobResult(1, f"host {refusal.refusal.replica}: {reason}")))
        failure = StopRequested(0, JobResult(1, reason))
        raise Interrupted(await self._events.report_within(self._options.report_timeout, failure))

    async def finish(self, attempts: Attempts, result: JobResult) -> JobResult | None:
        """Note the result of the current run; return that of the session if it ends with the run, else None."""
        return result

    def in_use(self) -> AbstractContextManager[None]:
        """Return a context within which the session does not end for lack of runs."""
        return contextlib.nullcontext()

    def mesh_shut_down(self) -> None:
        """End the session, if it ends with its mesh."""

    async def close(self, result: JobResult) -> None:
        """Tell the clients of the session its result."""


class SpmdWork:
    """Execute the runs of a session."""

    def __init__(
        self,
        session: Session,
        hosts: JobHosts,
        events: HostEvents,
        new_attempts: Callable[[], Attempts],
        recorder: SampleRecorder,
    ) -> None:
        self._session = session
        self._hosts = hosts
        self._events = events
        self._new_attempts = new_attempts
        self._attempts = new_attempts()
        self._recorder = recorder

    async def run(self, hosts: list[Registration]) -> JobResult:
        """Execute runs until the session ends, or continue the present one on other hosts.

        Raises:
            Interrupted: an event is pending; what runs on the hosts still runs.
        """
        # Hosts that outlived an earlier replica 0 have run attempts already.
        self._attempts.number = max(self._attempts.number, *(host.attempt + 1 for host in hosts))
        self._hosts.form(hosts)
        self._session.set_ready(True)
        try:
            while True:
                if not self._session.running:
                    self._attempts = self._new_attempts()
                    if idle := await self._events.interrupt(self._session.next_run(), concerns_hosts):
                        return idle
                with self._recorder.recording():
                    result = await self._execute(hosts)
                ended = await self._session.finish(self._attempts, result)
                # A request to end this run that is still pending concerns no run any more.
                self._events.settle_all(lambda event: isinstance(event, RunEndRequested))
                if ended is not None:
                    return ended
        finally:
            self._session.set_ready(False)

    async def _execute(self, hosts: list[Registration]) -> JobResult:
        """Execute the current run, or continue it on a new mesh, and return its result."""
        try:
            options, ready = await self._session.begin(hosts)
            self._attempts.begin(options)
            return await self._attempts.run(ready)
        except HostRefused as refusal:
            result = await self._session.refused(refusal)
            await self._attempts.stop(signal.SIGKILL)
            return result
        except Interrupted as interruption:
            if not isinstance(interruption.event, RunEndRequested):
                raise
            await self._attempts.stop(interruption.event.signal)
            return interruption.event.result

    async def stop(self, event: HostEvent, left: bool) -> bool:
        """Stop the ranks because of an event, and return whether there were any.

        Args:
            left: whether the host of the event has left.
        """
        if left:
            self._hosts.running.discard(event.replica)
        if not self._hosts.running:
            return False
        await self._attempts.stop(event.signal)
        self._hosts.running = set()
        return True

    def hosts_changed(self, joined: bool) -> None:
        """Count the attempt that has ended; ``joined`` says that a host has joined, and not left."""
        self._attempts.hosts_changed(joined)

    async def close(self, result: JobResult) -> None:
        """Tell the clients of the session its result."""
        await self._session.close(result)


class LiveSession(Session):
    """Execute the runs of an allocation on its hosts.

    Args:
        ends_with_mesh: whether a client that shuts the host mesh down ends the session.
    """

    def __init__(
        self,
        options: JobOptions,
        rendezvous: Rendezvous,
        reporter: Reporter,
        hosts: JobHosts,
        run_queue: RunQueue,
        ends_with_mesh: bool = False,
    ) -> None:
        super().__init__(options, rendezvous.events)
        self._reporter = reporter
        self._hosts = hosts
        self._run_queue = run_queue
        self.ends_with_mesh = ends_with_mesh
        run_queue.broadcast = self._broadcast
        rendezvous.on_output = self._output

    @property
    def running(self) -> bool:
        return self._run_queue.current is not None

    async def next_run(self) -> JobResult | None:
        """Wait for a run and make it the current one; return a result if there was none within the idle timeout."""
        if not await self._run_queue.run_wanted():
            return JobResult(
                0, f"no run and no client for {self._run_queue.idle_timeout:g} s: the hosts end", stopped=True
            )
        run = self._run_queue.begin()
        self._reporter.echo = lambda text: run.run_log.append({"type": "phase", "text": text})
        self._reporter.note("run", f"run {run.number}: {run.request.shown}", run=run.number)
        return None

    def in_use(self) -> AbstractContextManager[None]:
        return self._run_queue.in_use()

    def mesh_shut_down(self) -> None:
        if self.ends_with_mesh:
            self._events.post(StopRequested(0, JobResult(0, "the mesh was shut down by its client")))

    def set_ready(self, ready: bool) -> None:
        self._run_queue.ready = ready

    async def close(self, result: JobResult) -> None:
        """End all runs, because the hosts end."""
        self._reporter.echo = None
        await self._run_queue.close(result)

    # -- a run ---------------------------------------------------------------------------------------------------------

    async def begin(self, hosts: list[Registration]) -> tuple[JobOptions, list[Registration]]:
        run = self._run_queue.current
        assert run is not None
        begun: dict[int, RunBegun] = {}
        async for answer in self._hosts.ask(BeginRun(run.number, run.token, run.request)):
            begun[answer.replica] = answer
        run.ranks = sum(answer.nproc for answer in begun.values())
        first = begun[0]
        options = dataclasses.replace(
            self._options, run_id=first.run_id, max_restarts=first.max_restarts, grace=first.grace
        )
        return options, [dataclasses.replace(host, nproc=begun[host.replica].nproc) for host in hosts]

    async def refused(self, refusal: HostRefused) -> JobResult:
        """Return the result of a run that a host has refused; the host stays available."""
        return JobResult(refusal.refusal.code, str(refusal))

    async def finish(self, attempts: Attempts, result: JobResult) -> None:
        """Collect the last output of the current run, prepare the hosts for the next run, and report the result."""
        run = self._run_queue.current
        assert run is not None
        word = "STOPPED" if result.stopped else "FAILED" if result.code else "SUCCEEDED"
        finishing = asyncio.wait_for(self._broadcast(FinishRun(run.token)), _FINISH_TIMEOUT)
        try:
            await self._events.interrupt(finishing, concerns_hosts)  # a host sends its output before its answer
        except Interrupted:
            pass  # the hosts are not together any more, or the session ends: the next wait handles the event
        except (HostsError, asyncio.TimeoutError) as error:
            # The loss of a host is reported by a host event.
            self._reporter.line(f"some output of run {run.number} may be missing: {error or 'it did not come in time'}")
        self._reporter.echo = None
        exits = [{"type": "exit", "exit": attempts.exits[rank].to_json()} for rank in sorted(attempts.exits)]
        self._reporter.note("run_end", f"run {run.number} {word}: {result.reason}", run=run.number, code=result.code)
        self._run_queue.finish(run, result, [{"type": "attempts", "count": attempts.number + 1}, *exits])

    # -- requests to all hosts -----------------------------------------------------------------------------------------

    async def _broadcast(self, request: Request) -> list[Any]:
        if not self._run_queue.ready:
            raise HostsError("the hosts are not together")
        return await self._hosts.broadcast(request)

    # -- output of the other hosts -------------------------------------------------------------------------------------

    def _output(self, host: Registration, output: RunOutput) -> None:
        run = self._run_queue.current
        if run is None or output.token != run.token:
            return
        for line in output.records.splitlines():
            run.run_log.append_line(line.encode() + b"\n")
