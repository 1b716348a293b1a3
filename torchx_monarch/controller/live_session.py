# SPDX-License-Identifier: BSD-3-Clause
"""The session of a live allocation: the runs that clients submit, until it is released or idle."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import AbstractContextManager
from typing import Any

from torchx_monarch.controller.attempts import Attempts
from torchx_monarch.controller.host_events import Interrupted, StopRequested, concerns_hosts
from torchx_monarch.controller.host_messages import (
    BeginRun,
    FinishRun,
    Request,
    RunBegun,
    RunOutput,
)
from torchx_monarch.controller.hosts import HostRefused, HostsError, JobHosts
from torchx_monarch.controller.job_options import JobOptions
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.controller.run_queue import RunQueue
from torchx_monarch.controller.spmd_work import Session
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.model.registration import Registration

_FINISH_TIMEOUT = 30.0
"""Seconds for the hosts to send the last output of a run and to prepare for the next run."""


class LiveSession(Session):
    """Execute the runs of an allocation on its hosts.

    Args:
        options: options of the allocation.
        rendezvous: the rendezvous of hosts and clients.
        reporter: writes progress lines and events.
        hosts: the hosts, which are asked.
        run_queue: the runs.
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
        """Whether there is a current run."""
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
        """Return a context within which the idle timeout does not run (see ``Session``)."""
        return self._run_queue.in_use()

    def mesh_shut_down(self) -> None:
        """End the session, if it ends with its mesh (see ``Session``)."""
        if self.ends_with_mesh:
            self._events.post(StopRequested(0, JobResult(0, "the mesh was shut down by its client")))

    def set_ready(self, ready: bool) -> None:
        """Note whether the hosts are together, on a new mesh."""
        self._run_queue.ready = ready

    async def close(self, result: JobResult) -> None:
        """End all runs, because the hosts end."""
        self._reporter.echo = None
        await self._run_queue.close(result)

    # -- a run ---------------------------------------------------------------------------------------------------------

    async def begin(self, hosts: list[Registration]) -> tuple[JobOptions, list[Registration]]:
        """Prepare the hosts for the current run (see ``Session``)."""
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
