# SPDX-License-Identifier: BSD-3-Clause
"""The controller on replica 0: it gathers the hosts, runs a session on them, and decides how the job continues."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager

from torchx_monarch.controller.attempts import Attempts
from torchx_monarch.controller.elastic import HostGatherer, TooFewHosts
from torchx_monarch.controller.host_events import (
    HostEvent,
    HostExcluded,
    HostJoined,
    HostLost,
    HostPreempted,
    Interrupted,
    RunEndRequested,
    StopRequested,
    concerns_hosts,
)
from torchx_monarch.controller.host_messages import HostRefused
from torchx_monarch.controller.hosts import JobHosts, JobOptions
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.job_result import JobResult


class Session:
    """Execute the runs of the hosts, one after the other.

    This class is for a batch job: one run, for which the hosts are prepared when they register, and with which the
    session ends. A live allocation is a session that accepts runs until it is released or idle (``RunQueue``).
    """

    ends_with_mesh = False
    """Whether a Monarch client that shuts the host mesh down ends the session."""

    def __init__(self, hosts: JobHosts, new_attempts: Callable[[], Attempts]) -> None:
        self.hosts = hosts
        self._events = hosts.events
        self._new_attempts = new_attempts
        self._attempts = new_attempts()

    # -- for the controller --------------------------------------------------------------------------------------------

    async def run(self, hosts: list[Registration]) -> JobResult:
        """Execute runs until the session ends, or continue the present one on other hosts.

        Raises:
            Interrupted: an event is pending; what runs on the hosts still runs.
        """
        # Hosts that outlived an earlier replica 0 have run attempts already.
        self._attempts.number = max(self._attempts.number, *(host.attempt + 1 for host in hosts))
        self.hosts.form(hosts)
        try:
            while True:
                if not self.running:
                    self._attempts = self._new_attempts()
                    if idle := await self._events.interrupt(self.next_run(), concerns_hosts):
                        return idle
                result = await self._execute(hosts)
                ended = await self.finish(self._attempts, result)
                # A request to end this run that is still pending concerns no run any more.
                self._events.settle_all(lambda event: isinstance(event, RunEndRequested))
                if ended is not None:
                    return ended
        finally:
            self.hosts.formed.clear()

    async def _execute(self, hosts: list[Registration]) -> JobResult:
        try:
            options, ready = await self.begin(hosts)
            return await self._attempts.run(ready, options)
        except HostRefused as refusal:
            result = await self.refused(refusal)
            await self._attempts.stop(signal.SIGKILL)
            return result
        except Interrupted as interruption:
            if not isinstance(interruption.event, RunEndRequested):
                raise
            await self._attempts.stop(interruption.event.signal)
            return interruption.event.result

    async def stop(self, event: HostEvent, left: bool) -> bool:
        """Stop the ranks because of an event, whose host may have left; return whether there were any."""
        if left:
            self.hosts.running.discard(event.replica)
        if not self.hosts.running:
            return False
        await self._attempts.stop(event.signal)
        self.hosts.running = set()
        return True

    def hosts_changed(self, joined: bool) -> None:
        """Count the attempt that has ended; ``joined`` says that a host has joined, and not left."""
        self._attempts.hosts_changed(joined)

    async def close(self, result: JobResult) -> None:
        """Send the clients of the session its result."""

    # -- where a live allocation is different --------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether there is a current run."""
        return True

    async def next_run(self) -> JobResult | None:
        """Wait for a run and make it the current one; return a result if the session ends for lack of runs."""
        raise AssertionError("a batch job ends with its run")

    async def begin(self, hosts: list[Registration]) -> tuple[JobOptions, list[Registration]]:
        """Prepare the hosts for the current run; a repetition, on a new mesh, changes nothing on a prepared host.

        Returns:
            The options of the run, and the hosts with the number of ranks that each executes.

        Raises:
            Interrupted: an event is pending.
            HostRefused: a host cannot execute the run.
        """
        return self.hosts.options, hosts

    async def refused(self, refusal: HostRefused) -> JobResult:
        """Return the result of a run that a host has refused.

        Raises:
            Interrupted: the refusal, or what a host itself reports meanwhile, ends the job.
        """
        reason = (refusal.reason.splitlines() or ["refused"])[0]
        failure = StopRequested(0, JobResult(1, reason))
        raise Interrupted(await self._events.report_within(self.hosts.options.report_timeout, failure))

    async def finish(self, attempts: Attempts, result: JobResult) -> JobResult | None:
        """Note the result of the current run; return that of the session if it ends with the run, else None."""
        return result

    # -- for Monarch clients -------------------------------------------------------------------------------------------

    def in_use(self) -> AbstractContextManager[None]:
        """Return a context within which the session does not end for lack of runs."""
        return contextlib.nullcontext()


class Controller:
    """Run a job on the hosts of its role: the one consumer of ``HostEvents``."""

    ends_role = True

    def __init__(self, rendezvous: Rendezvous, gatherer: HostGatherer, session: Session) -> None:
        self._sizes = session.hosts.options.sizes
        self._replacements_left = session.hosts.options.spec.replacements
        self._rendezvous = rendezvous
        self._events = rendezvous.events
        self._reporter = session.hosts.reporter
        self._gatherer = gatherer
        self._session = session

    async def run(self) -> JobResult:
        """Run the job to its end and return its result. Failures of hosts and ranks do not raise."""
        wait, result = self._sizes.last_call, None
        while result is None:
            try:
                hosts = await self._gather(wait)
                result = await self._session.run(hosts)
            except Interrupted as interruption:
                event = interruption.event
                result = await self._handle(event)
                wait = self._next_wait(event) if result is None else 0.0
        await self._session.close(result)
        return result

    async def _gather(self, wait: float) -> list[Registration]:
        try:
            hosts = await self._events.interrupt(self._gatherer.gather(wait), concerns_hosts)
        except TooFewHosts as error:
            raise Interrupted(StopRequested(0, JobResult(1, str(error)))) from None
        members = {host.replica for host in hosts}

        def settled(event: HostEvent) -> bool:
            """Whether a mesh of these hosts is the answer to an event: its host is gone, or has joined."""
            gone = isinstance(event, HostLost) or (event.result.stopped and event.replica not in members)
            return event.replica != 0 and (gone or isinstance(event, HostJoined))

        self._events.settle_all(settled)
        return hosts

    async def _handle(self, event: HostEvent) -> JobResult | None:
        """Make the transition that an event causes; return the result of the job, or None if the job goes on."""
        self._events.settle_all(lambda pending: pending is event)
        wanted = isinstance(event, StopRequested) and event.result.stopped
        more = {"host": event.host} if isinstance(event, HostExcluded) else {}
        self._reporter.report("stop" if wanted else event.KIND, event.result.reason, replica=event.replica, **more)
        left = await self._dismiss_host(event)
        # The controller runs on replica 0, so an event of replica 0 ends the job.
        goes_on = (left or isinstance(event, (HostJoined, HostExcluded))) and event.replica != 0
        goes_on = goes_on and (self._sizes.can_lose or self._replacements_left > 0)
        if not goes_on:
            self._rendezvous.end()
        if await self._session.stop(event, left):
            # One new mesh is the answer to all of these.
            for lost in self._events.settle_all(lambda pending: isinstance(pending, (HostLost, HostJoined))):
                if isinstance(lost, HostLost):
                    self._reporter.report(lost.KIND, lost.result.reason, replica=lost.replica)
        if not goes_on:
            return event.result
        if shortage := self._gatherer.shortage(self._replacements_left > 0):
            return JobResult(1, f"{event.result.reason}; {shortage}")
        return None

    async def _dismiss_host(self, event: HostEvent) -> bool:
        """Return whether the host of an event has left.

        A preempted host leaves alone a job that can lose hosts, if more hosts than the minimum are present.
        """
        if isinstance(event, HostLost):
            for host in self._rendezvous.hosts.members:
                if host.replica == event.replica:
                    self._gatherer.blame(host, event.result.reason)
            return True
        leaves = event.replica != 0 and isinstance(event, HostPreempted) and self._sizes.can_lose
        if not leaves or self._rendezvous.hosts.present <= self._sizes.fewest:
            return False
        await self._rendezvous.dismiss(event.replica, event.result)
        return True

    def _next_wait(self, event: HostEvent) -> float:
        """Prepare the next attempt; return the seconds that it waits for hosts beyond the minimum."""
        joined, too_few = isinstance(event, HostJoined), self._rendezvous.hosts.present < self._sizes.fewest
        self._session.hosts_changed(joined)
        if joined:
            return 0.0
        replaced = self._replacements_left > 0
        if replaced and (too_few or not self._sizes.can_lose):
            self._replacements_left -= 1
            text = f"replica {event.replica} is to be replaced, {self._replacements_left} replacements left"
            self._reporter.report("replacement", text, replica=event.replica)
        return self._sizes.last_call if replaced or too_few else 0.0
