# SPDX-License-Identifier: BSD-3-Clause
"""The events that interrupt the work of a controller, and the collection of events that it has not handled yet."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import signal
from collections.abc import Awaitable, Callable, Collection
from typing import ClassVar, TypeVar

from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.job_result import JobResult, describe_code

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class HostEvent:
    """Something that ends an attempt although no rank has failed; ``replica`` is 0 for the whole job.

    ``result`` is that of the job if the event ends it; ``signal`` stops the ranks of the other hosts. ``saves``: ranks
    may first come to an agreed stop.
    """

    KIND: ClassVar[str] = "failure"

    replica: int
    result: JobResult
    signal: int = signal.SIGTERM
    saves: bool = False

    @property
    def kind(self) -> str:
        """The kind of the event in the events file."""
        return self.KIND


class HostLost(HostEvent):
    """A host can no longer receive requests; its ranks are gone, or it stops them itself."""


class HostJoined(HostEvent):
    """A host has registered while an attempt runs."""

    KIND = "joined"


class HostPreempted(HostEvent):
    """The machine of a host is preempted: the host stops its ranks and will end."""

    KIND = "preempted"


class HostExcluded(HostEvent):
    """A host has failed too often, and another one is to take its place; its ranks have ended."""

    KIND = "excluded"


class CommandFailed(HostEvent):
    """The command of a replica has failed, in a role of commands."""


class StopRequested(HostEvent):
    """The job must end: a client or a signal asks for it, another role has failed, or a host cannot start."""

    @property
    def kind(self) -> str:
        return "stop" if self.result.stopped else self.KIND


class RunEndRequested(HostEvent):
    """A run on a live allocation must end, and the hosts stay."""


def concerns_hosts(event: HostEvent) -> bool:
    """Return whether an event concerns the hosts, and not only the run that they execute."""
    return not isinstance(event, RunEndRequested)


class Changes:
    """Wake those that wait for a condition."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Have the conditions evaluated again."""
        while self._waiting:
            _wake(self._waiting.pop())

    async def until(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until a condition, which is evaluated at each change, holds; return whether it does in time.

        A cancellation always ends this, and that of ``asyncio.wait_for`` only since Python 3.12.
        """
        loop = asyncio.get_running_loop()
        end = math.inf if timeout is None else loop.time() + timeout
        while not condition():
            if loop.time() >= end:
                return False
            changed = loop.create_future()
            self._waiting.add(changed)
            timer = loop.call_at(end, _wake, changed) if timeout is not None else None
            try:
                await changed
            finally:
                self._waiting.discard(changed)
                if timer is not None:
                    timer.cancel()
        return True


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


class HostEvents:
    """The events that the controller has not handled yet, oldest first."""

    def __init__(self) -> None:
        self._pending: dict[HostEvent, None] = {}
        self._changes = Changes()

    def post(self, event: HostEvent) -> None:
        self._pending[event] = None
        self._changes.notify()

    @property
    def pending(self) -> Collection[HostEvent]:
        return self._pending.keys()

    def remove(self, event: HostEvent) -> None:
        """Remove an event that is pending. Only the controller calls this."""
        self._pending.pop(event, None)

    def take(self, wanted: Callable[[HostEvent], bool]) -> list[HostEvent]:
        """Remove the events to which a condition applies; return them. Only the controller calls this."""
        taken = [event for event in self._pending if wanted(event)]
        for event in taken:
            del self._pending[event]
        return taken

    async def report_within(self, seconds: float, failure: HostEvent) -> HostEvent:
        """Wait ``seconds`` for a host's own report of a failure; return ``failure`` if none arrives.

        The host's report names the cause better than its broken connection, but may arrive some seconds later.
        """
        await self._changes.until(lambda: any(map(concerns_hosts, self.pending)), seconds)
        return next(filter(concerns_hosts, self.pending), failure)

    async def until_event(
        self,
        work: Awaitable[T],
        wanted: Callable[[HostEvent], bool] = lambda event: True,
        seconds: float | None = None,
    ) -> T | HostEvent:
        """Do some work until an event is pending to which a condition applies.

        Return the outcome of the work, or the oldest event, which stays pending; the work has been cancelled then, and
        has ended. It does not begin if an event is pending already.

        Raises:
            asyncio.TimeoutError: the work, which has ended, took longer than ``seconds``; None for no limit.
        """
        working = asyncio.ensure_future(work)
        working.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may ask for it
        arriving = asyncio.ensure_future(self._changes.until(lambda: any(map(wanted, self.pending))))
        is_late = False
        try:
            if not any(map(wanted, self.pending)):
                done, _ = await asyncio.wait([working, arriving], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                is_late = not done
            if working.done():
                return working.result()
        finally:
            arriving.cancel()
            working.cancel()
        await asyncio.wait([working])
        if is_late:
            raise asyncio.TimeoutError
        return next(filter(wanted, self.pending))


def signalled(
    host: Registration, number: int, announced: bool | None, saves: bool = False
) -> HostPreempted | StopRequested:
    """Return the event of a host that received a signal.

    A SIGTERM that the backend has not announced (``MONARCH_STOP_FILE``) is a preemption. ``announced`` is None for a
    backend that cannot announce signals: its SIGTERM counts as a preemption, but may be a cancellation. ``saves``:
    whether the ranks of the host run on, until they have come to an agreed stop.
    """
    kind: type[HostPreempted | StopRequested] = StopRequested
    what = describe_code(-number).partition("by ")[2]
    reason = f"host {host.replica} was told to stop by {what}"
    if number == signal.SIGTERM and not announced:
        cause = "preempted or cancelled" if announced is None else "preempted"
        kind, reason = HostPreempted, f"{cause}: {host.name} received SIGTERM"
    return kind(host.replica, JobResult(128 + number, reason, stopped=True, replica=host.replica), number, saves)
