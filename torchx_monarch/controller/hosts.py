# SPDX-License-Identifier: BSD-3-Clause
"""The hosts on which replica 0 runs ranks, its requests to all of them, and the options of their job."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

from torchx_monarch.controller.elastic import NodeRange, listed
from torchx_monarch.controller.host_events import HostEvents, HostLost, Interrupted, StopRequested
from torchx_monarch.controller.host_messages import (
    AnswerT,
    Exits,
    Handler,
    HostCall,
    HostError,
    HostRefused,
    HostRequests,
    Request,
    StopRanks,
)
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.model.job_result import JobResult

_STOP_MARGIN = 10.0
"""Seconds beyond the grace period that hosts have to report that their ranks have ended."""


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """The options of a job that its controller needs.

    Attributes:
        master_addr: address by which ranks dial rank 0, unless the user names one.
        store_bind: local address on which rank 0's store listens, unless the user names one; empty for all.
        report_timeout: seconds to wait for a host's own report after it has refused a request.
    """

    spec: HostSpec
    sizes: NodeRange
    master_addr: str = ""
    store_bind: str = ""
    report_timeout: float = 1.0


class JobHosts:
    """The hosts of the present attempt, of which replica 0's own is the first.

    Attributes:
        present: the hosts, in the order of their node ranks; empty before the first attempt.
        running: replicas of the hosts whose ranks may run: those that are not known to be lost.
        formed: set while the hosts are together: from ``form`` on, until an event ends the attempt.
        reformed: set, and replaced, when the hosts of the next attempt are there.
    """

    def __init__(
        self,
        options: JobOptions,
        requests: HostRequests,
        events: HostEvents,
        reporter: Reporter,
        own_host: Handler,
    ) -> None:
        self.present: list[Registration] = []
        self.running: set[int] = set()
        self.formed = asyncio.Event()
        self.reformed = asyncio.Event()
        self.options = options
        self.events = events
        self.reporter = reporter
        self._requests = requests
        self._own_host = own_host
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop holds tasks by weak references only

    def form(self, hosts: list[Registration]) -> None:
        self.present = hosts
        self.running = {host.replica for host in hosts}
        self.formed.set()
        self.reformed.set()
        self.reformed = asyncio.Event()

    @property
    def all_connected(self) -> bool:
        """Whether none of the hosts is known to be lost."""
        return all(self._requests.reaches(host.replica) for host in self.present[1:])

    async def ask_own(self, request: Request[AnswerT], timeout: float) -> AnswerT:
        """Send a request to replica 0's own host alone, and return the answer (see ``ask``)."""
        return [answer async for _, answer in self.ask(request, timeout, self.present[:1])][0]

    async def ask_host(self, request: Request[AnswerT], host: Registration) -> AnswerT:
        """Send a request to one host and return the answer, whatever events are pending; raise its ``HostError``."""
        with self.call(request, hosts=[host]) as call:
            return await call.answer()

    async def ask(
        self, request: Request[AnswerT], timeout: float | None = None, hosts: Sequence[Registration] | None = None
    ) -> AsyncGenerator[tuple[int, AnswerT], None]:
        """Send a request to every host, or some with replica 0's own first; yield the answers as they arrive.

        ``timeout`` is for all answers; None for no limit: the leases of the hosts limit the wait for lost ones.

        Raises:
            Interrupted: an event is pending, a host is lost, or not all hosts answer in time.
            HostRefused: a host refused the request.
        """
        with self.call(request, timeout, hosts) as call:
            for _ in range(len(call.waiting)):
                try:
                    replica, answer = await self.events.interrupt(call.next())
                except asyncio.TimeoutError:
                    reason = f"host {listed(call.waiting)}: no answer to {type(request).__name__} in {timeout:g} s"
                    raise Interrupted(StopRequested(0, JobResult(1, reason))) from None
                if isinstance(answer, HostRefused):
                    raise answer
                if isinstance(answer, HostError):  # the event of the host's loss names the cause better
                    failure = StopRequested(0, JobResult(1, str(answer)))
                    raise Interrupted(await self.events.report_within(self.options.spec.lease, failure))
                yield replica, answer

    async def broadcast(self, request: Request[AnswerT]) -> list[AnswerT]:
        """Send a request to every host and return the answers, whatever events are pending.

        Raises:
            HostError: no hosts are together, or one refused the request or is lost.
        """
        if not self.formed.is_set():
            raise HostError("the hosts are not together")
        with self.call(request) as call:
            return [await call.answer() for _ in self.present]

    async def collect(self, request: Request[AnswerT], timeout: float) -> tuple[dict[int, AnswerT], dict[int, str]]:
        """Send a request to every host; return the answers, and why a host has not answered, by replica."""
        answers: dict[int, AnswerT] = {}
        missing: dict[int, str] = {}
        with self.call(request, timeout) as call, contextlib.suppress(asyncio.TimeoutError):
            for _ in self.present:
                replica, answer = await call.next()
                if isinstance(answer, HostError):
                    missing[replica] = answer.reason if isinstance(answer, HostRefused) else str(answer)
                else:
                    answers[replica] = answer
        missing.update(dict.fromkeys(sorted(call.waiting), f"no answer within {timeout:g} s"))
        return answers, missing

    async def stop(self, number: int, grace: float, add_exits: Callable[[Exits], None]) -> None:
        """Stop the ranks of every host that can be reached. Events stay pending meanwhile.

        A host that has lost replica 0 stops its ranks by itself. The ranks of a host that is gone are gone too.
        """
        if not self.present:
            return
        asked, within = set(self.running), grace + _STOP_MARGIN
        with self.call(StopRanks(number, grace), within) as call:
            try:
                while asked:
                    replica, answer = await call.next()
                    asked.discard(replica)
                    if not isinstance(answer, HostError):
                        add_exits(answer)
            except asyncio.TimeoutError:
                self.reporter.line(f"host {listed(asked)} did not stop its ranks within {within:g} s")
        self.running -= {event.replica for event in self.events.pending if isinstance(event, HostLost)}

    @contextlib.contextmanager
    def call(
        self, request: Request[AnswerT], timeout: float | None = None, hosts: Sequence[Registration] | None = None
    ) -> Iterator[HostCall[AnswerT]]:
        """Send a request as ``ask`` does; its answers arrive within the context, whose end cancels what is missing."""
        own = self.present[0].replica
        call = self._requests.begin(request, [host.replica for host in hosts or self.present], own, timeout)

        async def ask_own() -> None:
            if own not in call.waiting:
                return
            try:
                call.put(own, await self._own_host(request))
            except HostRefused as refusal:
                call.put(own, refusal)

        task = asyncio.ensure_future(ask_own())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            yield call
        finally:
            self._requests.end(call)
            task.cancel()
