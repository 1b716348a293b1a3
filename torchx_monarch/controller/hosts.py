# SPDX-License-Identifier: BSD-3-Clause
"""The hosts on which replica 0 runs ranks, and its requests to all of them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Awaitable, Collection, Iterator, Sequence
from typing import Any, Generic

from torchx_monarch.controller.elastic import HostGatherer, NodeRange, listed
from torchx_monarch.controller.host_events import HostEvent, HostLost, StopRequested, T
from torchx_monarch.controller.host_messages import (
    AnswerT,
    Handler,
    HostCall,
    HostError,
    HostLateError,
    HostRefused,
    Request,
    StopRanks,
    encode_request,
)
from torchx_monarch.controller.members import MemberState
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.transport import messages

_STOP_MARGIN = 60.0
"""Seconds beyond the grace period that hosts have to answer. They wait up to 50 s for what they have killed to end, and
``host_timeout`` for a disk on which ranks have left errors."""

_TIMEOUT = 8.0
"""Seconds for the answers of all hosts, of which some may be missing, unless they need longer."""

_SHARED_FOR = 1.0
"""Seconds for which the answers of all hosts are those to everybody who asks the same."""


@dataclasses.dataclass(frozen=True)
class Answers(Generic[AnswerT]):
    """What hosts have answered, and why the others have not, by replica; and the messages with it for clients."""

    by_replica: dict[int, AnswerT]
    missing: dict[int, str]
    encoded: list[bytes] = dataclasses.field(default_factory=list)


class JobHosts:
    """Ask the hosts of the present attempt, which ``members`` knows; replica 0's own through ``own_host``.

    Attributes:
        sizes: the number of hosts on which the job runs; ``gatherer`` gathers those of each attempt.
        report_timeout: seconds to wait for a host's own report after it has refused a request. Over a network, the loss
            of a machine is noticed only after ``peer_timeout`` seconds of silence.
    """

    def __init__(self, rendezvous: Rendezvous, sizes: NodeRange, reporter: Reporter, own_host: Handler) -> None:
        self.rendezvous = rendezvous
        self.spec = rendezvous.network.options
        self.sizes = sizes
        self.members = rendezvous.members
        self.events = rendezvous.events
        self.reporter = reporter
        self.gatherer = HostGatherer(sizes, self.members, reporter, self.spec.exclude_after)
        self.report_timeout = self.spec.peer_timeout + 3.0 if rendezvous.network.rendezvous.networked else 1.0
        self._own_host = own_host
        self._numbers = itertools.count()
        self._shared: dict[tuple[Request[Any], int], asyncio.Task[Answers[Any]]] = {}

    async def until_event(self, work: Awaitable[T]) -> T | HostEvent:
        """Do some work with the hosts until an event is pending; return its outcome, or the event (see ``HostEvents``).

        The error of a host that has not answered is an event, too: that of its loss, or a request to end the job.

        Raises:
            HostRefused: a host refused a request.
        """
        try:
            return await self.events.until_event(work)
        except HostRefused:
            raise
        except HostError as error:
            failure = StopRequested(0, JobResult(1, str(error)))
            return await self.events.report_within(self.spec.lease, failure)

    def settle(self, event: HostEvent) -> None:
        """Report an event, which is pending no longer. Only the controller calls this."""
        self.events.remove(event)
        self.reporter.report(event.kind, event.result.reason, replica=event.replica)

    async def ask_host(self, request: Request[AnswerT], replica: int, timeout: float | None = None) -> AnswerT:
        """Send a request to one host, and return the answer (see ``ask``)."""
        return (await self.ask(request, timeout, [replica]))[replica]

    async def ask(
        self, request: Request[AnswerT], timeout: float | None = None, replicas: Sequence[int] = ()
    ) -> dict[int, AnswerT]:
        """Send a request to every host, or to those of some replicas; return the answers by replica.

        ``timeout`` is for all answers; None for no limit: the leases of the hosts limit the wait for lost ones.

        Raises:
            HostError: the first error that has come instead of an answer.
        """
        answers: dict[int, AnswerT] = {}
        with self.call(request, timeout, replicas) as call:
            async for replica, answer in call:
                if isinstance(answer, HostLateError):
                    raise HostError(f"host {listed(answer.replicas)}: {answer} to {type(request).__name__}")
                if isinstance(answer, HostError):
                    raise answer
                answers[replica] = answer
        return answers

    async def broadcast(self, request: Request[AnswerT]) -> list[AnswerT]:
        """Send a request to every host, and return the answers (see ``ask``); ``HostError`` if one has left."""
        if not self.members.are_together:
            raise HostError("the hosts are not together")
        return list((await self.ask(request)).values())

    async def collect(
        self, request: Request[AnswerT], timeout: float = _TIMEOUT, ranks: Collection[int] = ()
    ) -> tuple[dict[int, AnswerT], dict[int, str]]:
        """Send a request to every host, or to those of some global ranks if all of these exist.

        Returns: the answers, and why a host has not answered, by replica.
        """
        world, replicas = self.members.attempt.world, list[int]()
        if world is not None and all(0 <= rank < world.size for rank in ranks):
            replicas = sorted({world.replica_of(rank) for rank in ranks})
        answers: dict[int, AnswerT] = {}
        missing: dict[int, str] = {}
        with self.call(request, timeout, replicas) as call:
            async for replica, answer in call:
                if isinstance(answer, HostError):
                    missing[replica] = answer.reason if isinstance(answer, HostRefused) else str(answer)
                else:
                    answers[replica] = answer
        return answers, missing

    async def collect_shared(
        self, request: Request[AnswerT], ranks: Collection[int] = (), afresh: bool = False
    ) -> Answers[AnswerT]:
        """Send a query as ``collect`` does, at most once a second: who asks meanwhile gets the same answers.

        Args:
            afresh: whether to send it in any case; others then get these answers.
        """
        loop, key = asyncio.get_running_loop(), (request, self.members.formation)

        async def ask() -> Answers[AnswerT]:
            return Answers(*await self.collect(request, ranks=ranks))

        def forget(done: asyncio.Task[Answers[Any]]) -> None:
            if self._shared.get(key) is done:
                del self._shared[key]

        if afresh or key not in self._shared:
            self._shared[key] = asking = asyncio.ensure_future(ask())
            asking.add_done_callback(lambda done: loop.call_later(_SHARED_FOR, forget, done))
        return await asyncio.shield(self._shared[key])

    async def stop(self, number: int, grace: float) -> None:
        """Stop the ranks of every host that can be reached, and add their exits. Events stay pending meanwhile.

        A host that has lost replica 0 stops its ranks by itself. The ranks of a host that is gone are gone too. One
        whose ranks have not all ended is lost: no attempt may begin beside them.
        """
        present = [member.host.replica for member in self.members.present]
        if not present:
            return
        within = grace + _STOP_MARGIN + self.spec.host_timeout
        with self.call(StopRanks(number, grace), within, present) as call:
            async for replica, answer in call:
                if isinstance(answer, HostRefused):
                    self._lose(replica, answer.reason)
                elif isinstance(answer, HostLateError):
                    self._lose(replica, str(answer))
                elif not isinstance(answer, HostError):
                    self.members.attempt.add(answer)

    def _lose(self, replica: int, reason: str) -> None:
        """Count a host of the attempt, which has not stopped its ranks, as lost, and end its connection."""
        if (member := self.members.in_attempt(replica)) is None:
            return
        if member.channel is not None:
            member.channel.close()
            self.members.set_state(member, MemberState.LOST)
        self.events.post(
            HostLost(replica, JobResult(1, f"{member.host.name} did not stop its ranks: {reason}", replica=replica))
        )

    @contextlib.contextmanager
    def call(
        self, request: Request[AnswerT], timeout: float | None = None, replicas: Sequence[int] = ()
    ) -> Iterator[HostCall[AnswerT]]:
        """Send a request as ``ask`` does; its answers arrive within the context, whose end cancels what is missing.

        This does not wait: a host that reads slowly delays no other.
        """
        call = HostCall(next(self._numbers), request, replicas or self.members.attempt.hosts)
        timer = asyncio.get_running_loop().call_later(timeout, call.expire, timeout) if timeout is not None else None

        async def ask_own() -> None:
            if 0 in call.waiting:
                try:
                    call.put(0, await self._own_host(request))
                except HostRefused as refusal:
                    call.put(0, refusal)

        task = asyncio.ensure_future(ask_own())
        try:
            data, failure = encode_request(call.number, request), "it is not connected"
        except messages.ProtocolError as error:
            data, failure = b"", str(error)
        asked = []
        for replica in call.waiting - {0}:
            if data and (member := self.members.in_attempt(replica)) and member.ask(call, data):
                asked.append(member)
            else:
                call.put(replica, HostError(f"host {replica} cannot be asked: {failure}"))
        try:
            yield call
        finally:
            task.cancel()
            if timer is not None:
                timer.cancel()
            for member in asked:
                member.cancel(call)
