# SPDX-License-Identifier: BSD-3-Clause
"""The controller on replica 0: it gathers the hosts, runs a session on them, and decides how the job continues."""

from __future__ import annotations

from torchx_monarch.controller.elastic import HostGatherer, TooFewHosts
from torchx_monarch.controller.host_events import (
    HostEvent,
    HostExcluded,
    HostJoined,
    HostLost,
    HostPreempted,
    Interrupted,
    StopRequested,
    concerns_hosts,
)
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.controller.session import Session
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.job_result import JobResult


class Controller:
    """Run a job on the hosts of its role: the one consumer of ``HostEvents``."""

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
        """Wait for the hosts of the next attempt.

        Args:
            wait: seconds to wait for hosts beyond the minimum.
        """
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
        self._reporter.note("stop" if wanted else event.KIND, event.result.reason, replica=event.replica, **more)
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
                    self._reporter.note(lost.KIND, lost.result.reason, replica=lost.replica)
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
            self._reporter.note("replacement", text, replica=event.replica)
        return self._sizes.last_call if replaced or too_few else 0.0
