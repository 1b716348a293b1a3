# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The mesh of the hosts, and the agents on it, through which the controller's requests reach the other hosts."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from torchx_monarch.controller.elastic import HostGatherer, listed
from torchx_monarch.controller.host_events import (
    HostEvent,
    HostEvents,
    HostLost,
    Interrupted,
    StopRequested,
    agent_lost,
    concerns_hosts,
)
from torchx_monarch.controller.host_messages import (
    Answer,
    Handler,
    RanksExited,
    Refused,
    Request,
    StopRanks,
    decode_answer,
    encode_request,
)
from torchx_monarch.controller.job_options import JobOptions
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.model.registration import Registration

if TYPE_CHECKING:
    from torchx_monarch.monarch_adapter.monarch_api import AgentMesh

T = TypeVar("T")

_MESH_TIMEOUT = 60.0
"""Seconds for attaching to the hosts and starting their agents."""

_STOP_MARGIN = 10.0
"""Seconds beyond the grace period that hosts have to report that their ranks have ended."""

_AGENT_ERROR = "AgentError: "
"""Precedes the host's own error text in the text of Monarch's error."""


class HostRefused(Exception):
    """A host cannot execute a request.

    Attributes:
        refusal: the host's answer.
        own: whether it answers a request to replica 0's host alone.
    """

    def __init__(self, refusal: Refused, own: bool = False) -> None:
        super().__init__(f"{refusal.host}: {refusal.reason}" if refusal.host else refusal.reason)
        self.refusal = refusal
        self.own = own


class HostsError(Exception):
    """A host could not execute a request that was sent to all hosts; the message names the host and the reason."""


class Agents:
    """Replica 0's host, and the agents of the other hosts of the present mesh.

    Attributes:
        hosts: the hosts of the mesh, in its order; empty before the first mesh.
        members: replicas of the hosts whose ranks may run: those of the mesh that are not known to be lost.

    Args:
        options: options of the job.
        events: the events that interrupt the controller.
        reporter: writes progress lines and events.
        own_host: executes requests to replica 0's host, which is this process and has no agent.
    """

    def __init__(self, options: JobOptions, events: HostEvents, reporter: Reporter, own_host: Handler) -> None:
        self.hosts: list[Registration] = []
        self.members: set[int] = set()
        self._options = options
        self._events = events
        self._reporter = reporter
        self._own_host = own_host
        self._mesh: AgentMesh | None = None
        self._meshes = 0
        self._asked: set[asyncio.Task[None]] = set()  # the event loop holds tasks by weak references only
        # Monarch's calls block. Each has its own thread, so that a pending call does not delay the next.
        self._threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="monarch-call")

    async def form(self, hosts: list[Registration], gatherer: HostGatherer) -> None:
        """Attach to the hosts other than replica 0's, which is the first, and start their agents.

        Raises:
            Interrupted: an event is pending, or the mesh could not be formed.
        """
        self._mesh = await self._attach(hosts[1:], gatherer) if len(hosts) > 1 else None
        self.hosts = hosts
        self.members = {host.replica for host in hosts}
        self._reporter.phase("mesh", "mesh")

    async def _attach(self, others: list[Registration], gatherer: HostGatherer) -> AgentMesh:
        from torchx_monarch.controller.agent import Agent
        from torchx_monarch.monarch_adapter.monarch_api import AgentMesh, host_without_agent

        try:
            addresses, number = [host.address for host in others], self._meshes
            self._meshes += 1
            forming = self._in_thread(AgentMesh, addresses, Agent, number, _MESH_TIMEOUT)
            waiting = self._reporter.while_waiting(forming, lambda: "the mesh")
            return await self._events.interrupt(waiting, concerns_hosts)
        except Interrupted:
            raise
        except Exception as error:
            print(f"the mesh could not be formed: {error}", file=sys.stderr, flush=True)  # stderr is Monarch's log
            place = host_without_agent(error)
            host = None if place is None else others[place]
            why = _first_line(error) if host is None else f"the agent of {host.name} did not start"
            reason = f"the mesh could not be formed: {why}; see {self._options.monarch_log}"
            failure = StopRequested(0, JobResult(1, reason, replica=-1 if host is None else host.replica))
            behind = await self._events.report_within(self._options.report_timeout, failure)
            if behind is failure:  # no host reported a failure: a connection between hosts that Monarch needs failed
                newcomers = [each for each in others if each not in self.hosts] if self.hosts else []
                suspects = newcomers if host is None else [host]
                behind = await gatherer.refuse({each.replica: reason for each in suspects}) or failure
            raise Interrupted(behind) from error

    async def ask_own(self, request: Request, timeout: float) -> Answer:
        """Have replica 0's host execute a request.

        Raises:
            Interrupted: an event is pending, or there is no answer within ``timeout`` seconds.
            HostRefused: the host refused the request.
        """
        # Not cancelled with this call: the next request would read the answer that is still due to this one.
        asking = asyncio.ensure_future(self._own_host(request))
        asking.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            answer = await self._events.interrupt(asyncio.wait_for(asyncio.shield(asking), timeout))
        except asyncio.TimeoutError:
            reason = f"host {self.hosts[0].replica}: no answer to {type(request).__name__} in {timeout:g} s"
            raise Interrupted(StopRequested(0, JobResult(1, reason))) from None
        if isinstance(answer, Refused):
            raise HostRefused(answer, own=True)
        return answer

    async def ask(self, request: Request) -> AsyncIterator[Any]:
        """Send a request to every host and yield the answers as they arrive.

        Raises:
            Interrupted: an event is pending, or a host answered with an error.
            HostRefused: a host refused the request.
        """
        answers = self._send(request)
        for _ in self.hosts:
            answer = await self._events.interrupt(answers.get())
            if isinstance(answer, Exception):
                failure = self._agent_lost(answer) or StopRequested(0, JobResult(1, _first_line(answer)))
                within = self._options.report_timeout if _AGENT_ERROR in str(answer) else self._options.lease
                raise Interrupted(await self._events.report_within(within, failure))
            if isinstance(answer, Refused):
                raise HostRefused(answer)
            yield answer

    async def broadcast(self, request: Request) -> list[Any]:
        """Send a request to every host and return the answers, whatever events are pending.

        Raises:
            HostsError: there is no mesh, or a host refused the request or answered with an error.
        """
        if not self.hosts:
            raise HostsError("the hosts are not together")
        answers, found = self._send(request), []
        for _ in list(self.hosts):
            answer = await answers.get()
            if isinstance(answer, Exception):
                raise HostsError(str(answer).strip().splitlines()[-1] if str(answer) else type(answer).__name__)
            if isinstance(answer, Refused):
                raise HostsError(f"{answer.host}: {answer.reason}")
            found.append(answer)
        return found

    async def collect(self, request: Request, timeout: float) -> tuple[list[Any], dict[int, str]]:
        """Send a request to every host; return the answers, and why a host has not answered, by replica.

        Args:
            request: the request.
            timeout: seconds for all answers.
        """
        answers, found, failure = self._send(request), [], f"no answer within {timeout:g} s"
        missing, loop = {host.replica for host in self.hosts}, asyncio.get_running_loop()
        refused: dict[int, str] = {}
        until = loop.time() + timeout
        for _ in list(self.hosts):
            try:
                answer = await asyncio.wait_for(answers.get(), until - loop.time())
            except asyncio.TimeoutError:
                break
            if isinstance(answer, Exception):  # it does not name its host
                failure = _first_line(answer)
                continue
            missing.discard(answer.replica)
            if isinstance(answer, Refused):
                refused[answer.replica] = answer.reason
            else:
                found.append(answer)
        return found, {**refused, **dict.fromkeys(sorted(missing), failure)}

    async def stop(self, number: int, grace: float, note: Callable[[RanksExited], None]) -> None:
        """Stop the ranks of every host that can be reached. Events stay pending meanwhile.

        A host whose agent is gone stops its ranks by itself. The ranks of a host that is gone are gone too.

        Args:
            number: the signal for the ranks; SIGKILL follows after the grace period.
            grace: seconds from the signal to SIGKILL.
            note: called with the answer of each host.
        """
        if not self.hosts:
            return
        asked, loop = set(self.members), asyncio.get_running_loop()
        until = loop.time() + grace + _STOP_MARGIN
        answers = self._send(StopRanks(number, grace))
        # One task for all rounds of the loop: the loss of a host that arrives with an answer must not lose the answer.
        getting = asyncio.ensure_future(answers.get())
        while asked:
            try:
                waiting = asyncio.wait([getting], timeout=until - loop.time())
                await self._events.interrupt(waiting, lambda event: _is_loss_of(event, asked))
            except Interrupted as interruption:
                asked.discard(interruption.event.replica)
                continue
            if not getting.done():
                late = listed(asked)
                self._reporter.line(f"host {late} did not stop its ranks within {grace + _STOP_MARGIN:g} s")
                break
            answer, getting = getting.result(), asyncio.ensure_future(answers.get())
            if isinstance(answer, RanksExited):
                note(answer)
                asked.discard(answer.replica)  # not from the exits: there are none if no rank was started
        getting.cancel()
        self.members -= {event.replica for event in self._events.pending if isinstance(event, HostLost)}

    def _agent_lost(self, error: Exception) -> HostEvent | None:
        """Return the event of a host whose agent died before it connected to the host process; None for other errors.

        The host process cannot report the death of an agent that never connected.
        """
        from torchx_monarch.monarch_adapter.monarch_api import host_without_agent

        place = host_without_agent(error)
        return agent_lost(self.hosts[1 + place]) if place is not None else None

    def _send(self, request: Request) -> asyncio.Queue[Any]:
        """Send a request to every host; return the queue into which each puts its answer, or the error."""
        answers: asyncio.Queue[Any] = asyncio.Queue()
        loop, mesh = asyncio.get_running_loop(), self._mesh

        async def ask_own() -> None:
            try:
                answers.put_nowait(await self._own_host(request))
            except Exception as error:
                answers.put_nowait(error)

        def pump(mesh: AgentMesh) -> None:
            for answer in mesh.stream(*encode_request(request)):
                with contextlib.suppress(RuntimeError):  # the event loop has ended
                    loop.call_soon_threadsafe(answers.put_nowait, _decoded(answer))

        task = asyncio.ensure_future(ask_own())
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)
        if mesh is not None:
            name = f"monarch-{type(request).__name__}"
            threading.Thread(target=pump, args=[mesh], name=name, daemon=True).start()
        return answers

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args))


def _decoded(answer: Any) -> Answer | Exception:
    if isinstance(answer, Exception):
        return answer
    try:
        return decode_answer(answer)
    except (ValueError, AttributeError) as error:
        return error


def _is_loss_of(event: HostEvent, replicas: Collection[int]) -> bool:
    return isinstance(event, HostLost) and event.replica in replicas


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's text, for an error of a host without the text that Monarch adds."""
    text = str(error).strip()
    if _AGENT_ERROR in text:
        text = text.rpartition(_AGENT_ERROR)[2]
    return text.splitlines()[0] if text else type(error).__name__
