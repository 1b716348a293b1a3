# SPDX-License-Identifier: BSD-3-Clause
"""The controller on replica 0: it gathers the hosts, executes runs on them, and decides how the job continues."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from torchx_monarch.controller.attempts import RankRun
from torchx_monarch.controller.hang_watch import HangWatch
from torchx_monarch.controller.host_events import (
    HostEvent,
    HostExcluded,
    HostJoined,
    HostLost,
    HostPreempted,
    RunEndRequested,
    StopRequested,
    concerns_hosts,
)
from torchx_monarch.controller.host_messages import BeginRun, HostRefused
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.model.job_result import JobResult

if TYPE_CHECKING:
    from torchx_monarch.controller.run_queue import Run, RunQueue


class Controller:
    """Run a job on the hosts of its role: the one consumer of ``HostEvents``.

    Args:
        queue: the runs of a live allocation; None for a batch job, which has one run and ends with it.
    """

    ends_role = True

    def __init__(self, hosts: JobHosts, hang_watch: HangWatch, queue: RunQueue | None = None) -> None:
        self._sizes = hosts.sizes
        self._replacements_left = hosts.spec.replacements
        self._events = hosts.events
        self._hosts = hosts
        self._members = hosts.members
        self._hang_watch = hang_watch
        self._run = RankRun(hosts, hang_watch)
        self._queue = queue

    async def run(self) -> JobResult:
        """Run the job to its end and return its result. Failures of hosts and ranks do not raise."""
        wait, result = self._sizes.last_call, None
        while result is None:
            ended = await self._gather(wait) or await self._execute_runs()
            if isinstance(ended, JobResult):
                result = ended
            elif (result := await self._handle(ended)) is None:
                wait = self._count_change(ended)
        await self._run.checkpoints.finish()
        if self._queue is not None:
            await self._queue.close(result)
        return result

    # -- runs ----------------------------------------------------------------------------------------------------------

    async def _execute_runs(self) -> JobResult | HostEvent:
        """Execute runs, or continue the present one on other hosts, until the job ends, or an event ends an attempt."""
        if self._queue is None:
            # Hosts that outlived an earlier replica 0 have run attempts already.
            self._run.continue_after([host.world for host in self._members.hosts if host.world is not None])
            return await self._execute()
        while True:
            run: Run | JobResult | HostEvent | None = self._queue.current
            if run is None:
                self._run = RankRun(self._hosts, self._hang_watch)
                run = await self._events.until_event(self._queue.next_run(), concerns_hosts)
            if isinstance(run, (JobResult, HostEvent)):
                return run
            ended = await self._execute(run)
            if isinstance(ended, RunEndRequested):
                await self._run.stop(ended.signal)
                ended = ended.result
            if isinstance(ended, HostEvent):
                return ended
            await self._run.checkpoints.finish()
            await self._queue.finish(run, ended)
            # A request to end this run that is still pending concerns no run any more.
            self._events.take(lambda event: isinstance(event, RunEndRequested))

    async def _execute(self, run: Run | None = None) -> JobResult | HostEvent:
        try:
            begun = await self._hosts.until_event(self._hosts.ask(run.begin if run else BeginRun()))
            if isinstance(begun, HostEvent):
                return begun
            if self._queue is not None and run is not None:
                self._queue.begun(run, sum(answer.nproc for answer in begun.values()))
            return await self._run.run(begun)
        except HostRefused as refusal:
            if self._queue is None:
                # The refusal, or what a host itself reports meanwhile, ends the job.
                why = str(refusal) if len(self._members.attempt.hosts) > 1 else refusal.reason
                failure = StopRequested(0, JobResult(1, (why.splitlines() or ["refused"])[0]))
                return await self._events.report_within(self._hosts.report_timeout, failure)
            await self._run.stop(signal.SIGKILL)
            return JobResult(refusal.code, str(refusal))

    # -- hosts ---------------------------------------------------------------------------------------------------------

    async def _gather(self, wait: float) -> HostEvent | None:
        """Gather the hosts of the next attempt, and wait some seconds for more than it needs; return what ends that."""
        event = await self._events.until_event(self._hosts.gatherer.gather(wait), concerns_hosts)

        def is_answered(event: HostEvent) -> bool:
            """Whether a mesh of these hosts is the answer to an event: its host is gone, or has joined."""
            left = event.result.stopped and event.replica not in self._members.attempt.hosts
            gone = isinstance(event, HostLost) or left
            return event.replica != 0 and (gone or isinstance(event, HostJoined))

        if event is None:
            self._events.take(is_answered)
        return event

    async def _handle(self, event: HostEvent) -> JobResult | None:
        """Make the transition that an event causes; return the result of the job, or None if the job goes on."""
        self._hosts.settle(event)
        left = self._dismiss_host(event)
        changes_hosts = left or isinstance(event, (HostJoined, HostExcluded))
        # The controller runs on replica 0, so an event of replica 0 ends the job.
        goes_on = changes_hosts and event.replica != 0 and (self._sizes.can_lose or self._replacements_left > 0)
        if not goes_on:
            self._hosts.rendezvous.put_off_restarted_hosts()
        await self._run.stop(event.signal)
        # One new mesh is the answer to all of these.
        answered = (HostLost, HostJoined)
        for other in self._events.take(lambda pending: isinstance(pending, answered) and pending.replica != 0):
            if isinstance(other, HostLost):
                self._hosts.settle(other)
        if not goes_on:
            return event.result
        if shortage := self._hosts.gatherer.why_too_few(are_replaced=self._replacements_left > 0):
            return JobResult(1, f"{event.result.reason}; {shortage}")
        return None

    def _dismiss_host(self, event: HostEvent) -> bool:
        """Return whether the host of an event has left.

        A preempted host leaves alone a job that can lose hosts, if more hosts than the minimum are present.
        """
        if isinstance(event, HostLost):
            self._hosts.gatherer.blame(event.replica, "lost", event.result.reason)
            return True
        leaves = event.replica != 0 and isinstance(event, HostPreempted) and self._sizes.can_lose
        if not leaves or self._members.able_count <= self._sizes.min_hosts:
            return False
        self._hosts.rendezvous.dismiss(event.replica, event.result)
        return True

    def _count_change(self, event: HostEvent) -> float:
        """Count an attempt and a replacement for a change of the hosts; return the seconds to wait for all hosts."""
        self._run.advance(is_restart=not isinstance(event, HostJoined))
        if isinstance(event, HostJoined):
            return 0.0
        too_few = self._members.able_count < self._sizes.min_hosts
        is_replaced = self._replacements_left > 0
        if is_replaced and (too_few or not self._sizes.can_lose):
            self._replacements_left -= 1
            text = f"replica {event.replica} is to be replaced, {self._replacements_left} replacements left"
            self._hosts.reporter.report("replacement", text, replica=event.replica)
        return self._sizes.last_call if is_replaced or too_few else 0.0
