# SPDX-License-Identifier: BSD-3-Clause
"""The hosts on which replica 0 runs ranks, its requests to all of them, and the options of their job."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

from torchx_monarch.controller.elastic import NodeRange, listed
from torchx_monarch.controller.host_events import HostEvents, HostLost, Interrupted, StopRequested
from torchx_monarch.controller.host_messages import (
    AnswerT,
    Exits,
    Handler,
    HostCall,
    HostError,
    HostRefused,
    Request,
    StopRanks,
    encode_request,
)
from torchx_monarch.controller.members import Members, MemberState
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.transport import messages

_STOP_MARGIN = 60.0
"""Seconds beyond the grace period that hosts have to answer. They wait up to 50 s for what they have killed to end."""


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
    """Ask the hosts of the present attempt, which ``members`` knows; replica 0's own through ``own_host``."""

    def __init__(
        self, options: JobOptions, members: Members, events: HostEvents, reporter: Reporter, own_host: Handler
    ) -> None:
        self.options = options
        self.members = members
        self.events = events
        self.reporter = reporter
        self._own_host = own_host
        self._numbers = itertools.count()
        self._calls: dict[int, HostCall[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop holds tasks by weak references only
        members.on_answer, members.on_lost = self._receive, self._drop

    async def ask_own(self, request: Request[AnswerT], timeout: float) -> AnswerT:
        """Send a request to replica 0's own host alone, and return the answer (see ``ask``)."""
        return [answer async for _, answer in self.ask(request, timeout, [0])][0]

    async def ask_host(self, request: Request[AnswerT], host: Registration) -> AnswerT:
        """Send a request to one host and return the answer, whatever events are pending; raise its ``HostError``."""
        with self.call(request, replicas=[host.replica]) as call:
            return await call.answer()

    async def ask(
        self, request: Request[AnswerT], timeout: float | None = None, replicas: Sequence[int] = ()
    ) -> AsyncGenerator[tuple[int, AnswerT], None]:
        """Send a request to every host, or to those of some replicas; yield the answers as they arrive.

        ``timeout`` is for all answers; None for no limit: the leases of the hosts limit the wait for lost ones.

        Raises:
            Interrupted: an event is pending, a host is lost, or not all hosts answer in time.
            HostRefused: a host refused the request.
        """
        with self.call(request, timeout, replicas) as call:
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
            HostError: the hosts are not together, or one refused the request or is lost.
        """
        if not self.members.are_together:
            raise HostError("the hosts are not together")
        with self.call(request) as call:
            return [await call.answer() for _ in range(len(self.members.attempt))]

    async def collect(self, request: Request[AnswerT], timeout: float) -> tuple[dict[int, AnswerT], dict[int, str]]:
        """Send a request to every host; return the answers, and why a host has not answered, by replica."""
        answers: dict[int, AnswerT] = {}
        missing: dict[int, str] = {}
        with self.call(request, timeout) as call, contextlib.suppress(asyncio.TimeoutError):
            for _ in range(len(self.members.attempt)):
                replica, answer = await call.next()
                if isinstance(answer, HostError):
                    missing[replica] = answer.reason if isinstance(answer, HostRefused) else str(answer)
                else:
                    answers[replica] = answer
        missing.update(dict.fromkeys(sorted(call.waiting), f"no answer within {timeout:g} s"))
        return answers, missing

    async def stop(self, number: int, grace: float, add_exits: Callable[[Exits], None]) -> None:
        """Stop the ranks of every host that can be reached. Events stay pending meanwhile.

        A host that has lost replica 0 stops its ranks by itself. The ranks of a host that is gone are gone too. One
        whose ranks have not all ended is lost: no attempt may begin beside them.
        """
        if not self.members.attempt:
            return
        asked, within = set(filter(self.members.in_attempt, self.members.attempt)), grace + _STOP_MARGIN
        left: dict[int, str] = {}
        with self.call(StopRanks(number, grace), within) as call:
            try:
                while asked:
                    replica, answer = await call.next()
                    asked.discard(replica)
                    if isinstance(answer, HostRefused):
                        left[replica] = answer.reason
                    elif not isinstance(answer, HostError):
                        add_exits(answer)
            except asyncio.TimeoutError:
                left.update(dict.fromkeys(asked, f"no answer within {within:g} s"))
        for replica, reason in left.items():
            self._lose(replica, f"did not stop its ranks: {reason}")

    def _lose(self, replica: int, how: str) -> None:
        """Count a host of the attempt as lost, and end its connection."""
        if (member := self.members.in_attempt(replica)) is None:
            return
        if member.channel is not None:
            member.channel.close()
            self.members.set_state(member, MemberState.LOST)
        self.events.post(HostLost(replica, JobResult(1, f"{member.host.name} {how}", replica=replica)))

    @contextlib.contextmanager
    def call(
        self, request: Request[AnswerT], timeout: float | None = None, replicas: Sequence[int] = ()
    ) -> Iterator[HostCall[AnswerT]]:
        """Send a request as ``ask`` does; its answers arrive within the context, whose end cancels what is missing.

        This does not wait: a host that reads slowly delays no other.
        """
        call = HostCall(next(self._numbers), request, replicas or self.members.attempt, timeout)
        self._calls[call.number] = call

        async def ask_own() -> None:
            if 0 in call.waiting:
                try:
                    call.put(0, await self._own_host(request))
                except HostRefused as refusal:
                    call.put(0, refusal)

        task = asyncio.ensure_future(ask_own())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            data, failure = encode_request(call.number, request), "it is not connected"
        except messages.ProtocolError as error:
            data, failure = b"", str(error)
        for replica in call.waiting - {0}:
            if not (data and self.members.write(replica, data)):
                call.put(replica, HostError(f"host {replica} cannot be asked: {failure}"))
        try:
            yield call
        finally:
            task.cancel()
            del self._calls[call.number]
            cancel = messages.encode({"type": "cancel", "id": call.number})
            for replica in call.waiting:
                self.members.write(replica, cancel)

    def _receive(self, replica: int, message: messages.Message) -> None:
        """Pass on the answer of a host to the call that waits for it, if one still does."""
        number = message.get("id")
        if isinstance(number, int) and number in self._calls:
            self._calls[number].receive(replica, message)

    def _drop(self, replica: int) -> None:
        """Have no call wait for a host whose connection has ended."""
        for call in self._calls.values():
            call.put(replica, HostError(f"the connection of host {replica} has ended"))
