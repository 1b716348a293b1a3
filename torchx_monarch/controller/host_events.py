# SPDX-License-Identifier: BSD-3-Clause
"""The events that interrupt the work of a controller, and the collection of events that it has not handled yet."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import Awaitable, Callable
from typing import ClassVar, TypeVar

from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.job_result import JobResult, describe_code

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class HostEvent:
    """Something that ends an attempt although no rank has failed; ``replica`` is 0 for the whole job.

    ``result`` is that of the job if the event ends it; ``signal`` stops the ranks of the other hosts.
    """

    KIND: ClassVar[str] = "failure"
    """The kind of the event in the events file."""

    replica: int
    result: JobResult
    signal: int = signal.SIGTERM


class HostLost(HostEvent):
    """A host can no longer receive requests; its ranks are gone, or it stops them itself."""


class HostJoined(HostEvent):
    """A host has registered while an attempt runs."""

    KIND = "joined"


class HostPreempted(HostEvent):
    """The machine of a host is preempted: the host stops its ranks and will end."""

    KIND = "preempted"


@dataclasses.dataclass(frozen=True, eq=False)
class HostExcluded(HostEvent):
    """A host has failed too often, and another one is to take its place; its ranks have ended."""

    KIND = "excluded"

    host: str = ""
    """The name under which its failures were counted."""


class StopRequested(HostEvent):
    """The job must end: a client or a signal asks for it, another role has failed, or a host cannot start."""


class RunEndRequested(HostEvent):
    """A run on a live allocation must end, and the hosts stay."""


def concerns_hosts(event: HostEvent) -> bool:
    """Return whether an event concerns the hosts, and not only the run that they execute."""
    return not isinstance(event, RunEndRequested)


class Interrupted(Exception):
    """An event arrived while the controller was waiting for something else."""

    def __init__(self, event: HostEvent) -> None:
        super().__init__(event.result.reason)
        self.event = event


class Changes:
    """Wake those that wait for a condition."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Have the conditions evaluated again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until a condition, which is evaluated at each change, holds; return whether it does in time."""

        async def wait() -> bool:
            while not condition():
                await self._changed.wait()
            return True

        try:
            return await asyncio.wait_for(wait(), timeout)
        except asyncio.TimeoutError:
            return condition()


class HostEvents:
    """The events that the controller has not handled yet, oldest first."""

    def __init__(self) -> None:
        self.pending: list[HostEvent] = []
        self._changes = Changes()

    def post(self, event: HostEvent) -> None:
        self.pending.append(event)
        self._changes.notify()

    def take(self, wanted: Callable[[HostEvent], bool]) -> list[HostEvent]:
        """Remove the events to which a condition applies; return them. Only the controller calls this."""
        taken = [event for event in self.pending if wanted(event)]
        self.pending = [event for event in self.pending if not wanted(event)]
        return taken

    async def next(self, wanted: Callable[[HostEvent], bool] = lambda event: True) -> HostEvent:
        """Wait until an event to which a condition applies is pending; return the oldest one, which stays pending."""
        await self._changes.until(lambda: any(map(wanted, self.pending)))
        return next(filter(wanted, self.pending))

    async def report_within(self, seconds: float, failure: HostEvent) -> HostEvent:
        """Wait ``seconds`` for a host's own report of a failure; return ``failure`` if none arrives.

        The host's report names the cause better than its broken connection, but may arrive some seconds later.
        """
        try:
            return await asyncio.wait_for(self.next(concerns_hosts), seconds)
        except asyncio.TimeoutError:
            return failure

    async def interrupt(self, awaitable: Awaitable[T], wanted: Callable[[HostEvent], bool] = lambda event: True) -> T:
        """Await something; raise ``Interrupted`` if an event is pending, or arrives, before it is done."""
        work, event = asyncio.ensure_future(awaitable), asyncio.ensure_future(self.next(wanted))
        try:
            await asyncio.wait([work, event], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            raise Interrupted(event.result())
        finally:
            work.cancel()
            event.cancel()


def signalled(host: Registration, number: int, announced: bool | None) -> HostPreempted | StopRequested:
    """Return the event of a host that received a signal.

    A SIGTERM that the backend has not announced (``MONARCH_STOP_FILE``) is a preemption. ``announced`` is None for a
    backend that cannot announce signals: its SIGTERM counts as a preemption, but may be a cancellation.
    """
    kind: type[HostPreempted | StopRequested] = StopRequested
    what = describe_code(-number).partition("by ")[2]
    reason = f"host {host.replica} was told to stop by {what}"
    if number == signal.SIGTERM and not announced:
        cause = "preempted or cancelled" if announced is None else "preempted"
        kind, reason = HostPreempted, f"{cause}: {host.name} received SIGTERM"
    return kind(host.replica, JobResult(128 + number, reason, stopped=True, replica=host.replica), number)
