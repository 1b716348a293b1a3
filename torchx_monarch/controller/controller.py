# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The controller on replica 0: it gathers hosts, forms the mesh, runs attempts and returns the verdict of the job."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from torchx_monarch.controller import retry
from torchx_monarch.controller.elastic import HostGatherer, TooFewHosts
from torchx_monarch.controller.host_events import (
    HostEvent,
    HostJoined,
    HostLost,
    HostPreempted,
    Interrupted,
    StopRequested,
    agent_lost,
    concerns_hosts,
)
from torchx_monarch.controller.job_options import JobOptions
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.job_result import JobResult, RankExit, describe_others, root_cause, shell_code
from torchx_monarch.model.registration import Registration
from torchx_monarch.model.world import World
from torchx_monarch.transport import agent_rpc

if TYPE_CHECKING:
    from torchx_monarch.monarch_adapter.monarch_api import AgentMesh

T = TypeVar("T")

_MESH_TIMEOUT = 60.0
"""Seconds for attaching to the hosts and starting their agents."""

_STOP_MARGIN = 10.0
"""Seconds beyond the grace period that hosts have to report that their ranks have ended."""

_NAMED_HOST_REPORT_TIMEOUT = 1.0
"""Seconds to wait for a host's own report when the failure names the host already and no replacement will come."""


_AGENT_ERROR = "AgentError: "
"""Precedes the host's own error text in the text of Monarch's error."""


class HostRefused(Exception):
    """A host of a live allocation refused a request, and stays available.

    Attributes:
        code: exit code of the run that needed the request.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Controller:
    """Run the attempts of a role on its hosts.

    Args:
        options: options of the job.
        rendezvous: the rendezvous at which the hosts register.
        reporter: writes progress lines and events.
        first_output: set when a rank of this host has printed something.
        unreachable: returns the reason for each host that cannot be reached, by replica.
        own_host: executes requests to replica 0's host, which is this process, without a detour through its agent.
    """

    def __init__(
        self,
        options: JobOptions,
        rendezvous: Rendezvous,
        reporter: Reporter,
        first_output: asyncio.Event,
        unreachable: Callable[[Iterable[Registration]], Awaitable[dict[int, str]]],
        own_host: agent_rpc.Handler,
    ) -> None:
        self._options = options
        self._rendezvous = rendezvous
        self._events = rendezvous.events
        self._gatherer = HostGatherer(options.sizes, rendezvous, reporter, unreachable)
        self._reporter = reporter
        self._first_output = first_output
        self._own_host = own_host
        self._asked: set[asyncio.Task[None]] = set()  # the event loop holds tasks by weak references only
        # Monarch's calls block. Each has its own thread, so that a pending call does not delay the next.
        self._threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="monarch-call")
        self._mesh: AgentMesh | None = None
        self._meshes = 0
        self._hosts: list[Registration] = []
        self._members: set[int] = set()
        self._attempt_number = 0
        self._launched = -1
        self._uncounted = 0
        self._restarts_left = options.max_restarts
        self._replacements_left = options.replacements
        self._exits: dict[int, RankExit] = {}

    async def run(self) -> JobResult:
        """Run the job to its end and return the verdict. Failures of hosts and ranks do not raise."""
        wait = self._options.sizes.last_call
        while True:
            try:
                hosts = await self._gather(wait)
                # Hosts that outlived an earlier replica 0 have run attempts already.
                self._attempt_number = max(self._attempt_number, *(host.attempt + 1 for host in hosts))
                await self._form_mesh(hosts)
                return await self._work(hosts)
            except Interrupted as interruption:
                event = interruption.event
            self._events.settle(event)
            self._reporter.note(event.KIND, event.result.reason, replica=event.replica)
            leaves = await self._dismiss_host(event)
            if leaves:
                self._members.discard(event.replica)
            # The controller runs on replica 0, so an event of replica 0 ends the job.
            goes_on = (leaves or isinstance(event, HostJoined)) and event.replica != 0
            goes_on = goes_on and (self._options.sizes.elastic or self._replacements_left > 0)
            if not goes_on:
                self._rendezvous.end()
            if self._members:
                await self._stop_ranks(event.signal)
                # One new mesh is the answer to all of these.
                for lost in self._events.settle_all(lambda pending: isinstance(pending, (HostLost, HostJoined))):
                    if isinstance(lost, HostLost):
                        self._reporter.note(lost.KIND, lost.result.reason, replica=lost.replica)
            self._members = set()
            if not goes_on:
                return event.result
            if shortage := self._gatherer.shortage(self._replacements_left > 0):
                return JobResult(1, f"{event.result.reason}; {shortage}")
            wait = self._next_wait(event)

    async def _dismiss_host(self, event: HostEvent) -> bool:
        """Return whether the host of an event has left.

        A preempted host leaves an elastic job alone, if more hosts than the minimum are present.
        """
        if isinstance(event, HostLost):
            return True
        leaves = event.replica != 0 and isinstance(event, HostPreempted) and self._options.sizes.elastic
        if not leaves or self._rendezvous.present <= self._options.sizes.fewest:
            return False
        await self._rendezvous.dismiss(event.replica, event.result)
        return True

    def _next_wait(self, event: HostEvent) -> float:
        """Prepare the next attempt; return the seconds that it waits for hosts beyond the minimum."""
        sizes, joined = self._options.sizes, isinstance(event, HostJoined)
        # An elastic job counts only attempts whose ranks had started.
        if self._launched == self._attempt_number or not sizes.elastic:
            self._attempt_number += 1
            self._uncounted += joined
        if joined:
            return 0.0
        replaced = self._replacements_left > 0
        if replaced and (self._rendezvous.present < sizes.fewest or not sizes.elastic):
            self._replacements_left -= 1
            text = f"replica {event.replica} is to be replaced, {self._replacements_left} replacements left"
            self._reporter.note("replacement", text, replica=event.replica)
        return sizes.last_call if replaced or self._rendezvous.present < sizes.fewest else 0.0

    async def _gather(self, wait: float) -> list[Registration]:
        hosts: list[Registration] = []
        while not hosts:
            try:
                await self._events.interrupt(self._gatherer.enough(wait), concerns_hosts)
            except TooFewHosts as error:
                raise Interrupted(StopRequested(0, JobResult(1, str(error)))) from None
            hosts = self._gatherer.form()
        members = {host.replica for host in hosts}

        def settled(event: HostEvent) -> bool:
            """Whether a mesh of these hosts is the answer to an event: its host is gone, or has joined."""
            gone = isinstance(event, HostLost) or (event.result.stopped and event.replica not in members)
            return event.replica != 0 and (gone or isinstance(event, HostJoined))

        self._events.settle_all(settled)
        return hosts

    async def _form_mesh(self, hosts: list[Registration]) -> None:
        from torchx_monarch.controller.agent import Agent
        from torchx_monarch.monarch_adapter.monarch_api import AgentMesh, host_without_agent

        if wrong := await self._events.interrupt(self._gatherer.unreachable(hosts), concerns_hosts):
            if refused := await self._gatherer.refuse(wrong):
                raise Interrupted(refused)
            within = self._options.report_timeout if self._replacements_left else _NAMED_HOST_REPORT_TIMEOUT
            first = StopRequested(0, JobResult(1, next(iter(wrong.values()))))
            raise Interrupted(await self._await_host_report(first, within))
        try:
            addresses, number = [host.address for host in hosts], self._meshes
            self._meshes += 1
            mesh = self._in_thread(AgentMesh, addresses, Agent, number, _MESH_TIMEOUT)
            self._mesh = await self._events.interrupt(
                self._reporter.while_waiting(mesh, lambda: "the mesh"), concerns_hosts
            )
        except Interrupted:
            raise
        except Exception as error:
            print(f"the mesh could not be formed: {error}", file=sys.stderr, flush=True)  # stderr is Monarch's log
            place = host_without_agent(error)
            why = _first_line(error) if place is None else f"the agent of {hosts[place].name} did not start"
            reason = f"the mesh could not be formed: {why}; see {self._options.monarch_log}"
            failure = StopRequested(0, JobResult(1, reason, replica=-1 if place is None else place))
            behind = await self._await_host_report(failure, self._options.report_timeout)
            if behind is failure:  # no host reported a failure: a connection between hosts that Monarch needs failed
                suspects = self._newcomers(hosts) if place is None else [hosts[place]]
                behind = await self._gatherer.refuse({host.replica: reason for host in suspects}) or failure
            raise Interrupted(behind) from error
        self._hosts = hosts
        self._members = {host.replica for host in hosts}
        self._reporter.phase("mesh", "mesh")

    def _newcomers(self, hosts: list[Registration]) -> list[Registration]:
        """Return the hosts that were not in the previous mesh; none if there was no previous mesh."""
        return [host for host in hosts if host not in self._hosts] if self._hosts else []

    async def _work(self, hosts: list[Registration]) -> JobResult:
        """Do the job's work on the mesh that has been formed; return the verdict."""
        return await self._attempts(hosts)

    async def _attempts(self, hosts: list[Registration]) -> JobResult:
        budget, never_joined = self._options.max_restarts, frozenset[int]()
        backoff, clock = retry.Backoff(), asyncio.get_running_loop().time
        began = clock()
        while cause := await self._attempt(hosts, self._attempt_number):
            lived = clock() - began
            for line in describe_others(self._exits.values(), cause):
                self._reporter.line(f"also: {line}")
            before, never_joined = never_joined, retry.never_joined(self._exits.values())
            reason = retry.why_not(cause, never_joined, before, self._options.retry_on)
            if self._restarts_left == 0 or reason:
                if self._restarts_left:
                    self._reporter.line(f"no restart: {reason}")
                return JobResult(shell_code(cause.code), cause.describe(), cause)
            self._restarts_left -= 1
            self._attempt_number += 1
            text = f"restart {budget - self._restarts_left} of {budget} after: {cause.describe()}"
            self._reporter.restarted(text, attempt=self._attempt_number, rank=cause.rank, code=cause.code)
            if delay := backoff.delay(lived):
                self._reporter.line(f"the restart waits {delay:.1f} s: the last attempt failed after {lived:.1f} s")
                await self._events.interrupt(asyncio.sleep(delay))
            began = clock()
        return JobResult(0, f"all {sum(host.nproc for host in hosts)} ranks ended with code 0")

    async def _attempt(self, hosts: list[Registration], attempt: int) -> RankExit | None:
        """Run the ranks once; return the root cause of a failure, or None if all ranks ended with code 0."""
        options = self._options
        self._exits = {}
        if options.sizes.elastic and (newcomers := await self._events.interrupt(self._gatherer.reachable_newcomers())):
            raise Interrupted(_joined(newcomers[0]))
        wanted = {"bind": options.store_bind, "advertised": options.master_addr, "hosts": len(hosts)}
        store = self._call_own("store", wanted, options.host_timeout)
        address, port, agent_store = await self._reporter.while_waiting(store, lambda: "the interpreter of rank 0")
        world = World(
            attempt=attempt,
            log_attempt=options.first_log_attempt + attempt,
            restart_count=attempt - self._uncounted,
            replicas=tuple(host.replica for host in hosts),
            local_world_sizes=tuple(host.nproc for host in hosts),
            master_addr=address,
            master_port=port,
            agent_store=agent_store,
            run_id=options.run_id,
        )
        spares = self._restarts_left > 0 or self._replacements_left > 0 or options.sizes.elastic
        self._launched = attempt
        async for _ in self._each_host("launch", {"world": world.to_json(), "spares": spares}, hosts):
            pass
        self._reporter.phase("ranks", f"ranks {world.size}/{world.size}", attempt=attempt)
        output = asyncio.ensure_future(self._report_output()) if attempt == 0 else None
        growth = asyncio.ensure_future(self._report_newcomer())
        try:
            async for answer in self._each_host("watch", {}, hosts):
                await asyncio.sleep(0)  # lets ``_report_output`` run first: output is reported before exits
                self._note_exits(answer["exits"])
                growth.cancel()  # once the ranks of a host have ended, a further host is of no use
                if cause := root_cause(self._exits.values()):
                    self._reporter.note("failure", cause.describe(), rank=cause.rank)
                    await self._stop_ranks(signal.SIGTERM)
                    # Ranks that had failed before the stop have reported their exits by now.
                    cause = root_cause(self._exits.values())
                    self._blame_hosts(cause)
                    return cause
        finally:
            growth.cancel()
        if output is not None:
            output.cancel()
        return None

    def _blame_hosts(self, cause: RankExit | None) -> None:
        """Raise the pending event that may have caused the ranks' failure, if there is one.

        Ranks may notice the loss of a host before the controller does.
        """
        blamed: list[HostEvent] = []
        if self._options.sizes.elastic:
            leaves = (HostLost, HostPreempted)
            blamed = [one for one in self._events.pending if one.replica != 0 and isinstance(one, leaves)]
        elif cause is None or cause.is_collateral or self._restarts_left:
            # Stop requests first: they end the job.
            blamed = sorted(self._events.pending, key=lambda one: isinstance(one, HostLost))
        if blamed:
            raise Interrupted(blamed[0])

    async def _report_newcomer(self) -> None:
        if self._options.sizes.elastic:
            self._events.post(_joined(await self._gatherer.newcomer()))

    async def _report_output(self) -> None:
        await self._first_output.wait()
        self._reporter.phase("output", "first output")

    # -- the hosts' agents --------------------------------------------------------------------------------------------

    async def _call_own(self, op: str, args: dict[str, Any], timeout: float) -> Any:
        try:
            # Not cancelled with this call: the next request would read the answer that is still due to this one.
            asking = asyncio.ensure_future(self._own_host(op, args))
            asking.add_done_callback(lambda done: done.cancelled() or done.exception())
            return _raise_if_refused(await self._events.interrupt(asyncio.wait_for(asyncio.shield(asking), timeout)))
        except (Interrupted, HostRefused):
            raise
        except asyncio.TimeoutError:
            reason = f"host 0: no answer to {op!r} in {timeout:g} s"
        except Exception as error:
            reason = f"host 0: {_first_line(error)}"
        raise Interrupted(StopRequested(0, JobResult(1, reason)))

    async def _each_host(self, op: str, args: dict[str, Any], hosts: Iterable[Registration]) -> Any:
        """Send a request to every host and yield the answers as they arrive.

        Raises:
            Interrupted: an event is pending, or a host answered with an error.
            HostRefused: a host refused the request.
        """
        answers: asyncio.Queue[Any] = asyncio.Queue()
        self._stream_into(answers, op, args)
        for _ in hosts:
            answer = await self._events.interrupt(answers.get())
            if isinstance(answer, Exception):
                failure = self._agent_lost(answer) or StopRequested(0, JobResult(1, _first_line(answer)))
                within = self._options.report_timeout if _AGENT_ERROR in str(answer) else self._options.lease
                raise Interrupted(await self._await_host_report(failure, within))
            yield _raise_if_refused(answer)

    def _agent_lost(self, error: Exception) -> HostEvent | None:
        """Return the event of a host whose agent died before it connected to the host process; None for other errors.

        The host process cannot report the death of an agent that never connected.
        """
        from torchx_monarch.monarch_adapter.monarch_api import host_without_agent

        place = host_without_agent(error)
        return agent_lost(self._hosts[place]) if place is not None else None

    async def _await_host_report(self, failure: HostEvent, within: float) -> HostEvent:
        """Wait ``within`` seconds for a host's own report; return ``failure`` if none arrives.

        The host's report names the cause better than Monarch's error, but may arrive some seconds later.
        """
        try:
            return await asyncio.wait_for(self._events.next(concerns_hosts), within)
        except asyncio.TimeoutError:
            return failure

    def _stream_into(self, answers: asyncio.Queue[Any], op: str, args: dict[str, Any]) -> None:
        loop, mesh = asyncio.get_running_loop(), self._mesh
        assert mesh is not None

        async def ask_own() -> None:
            try:
                answer = await self._own_host(op, args)
            except Exception as error:
                answer = error
            answers.put_nowait(answer)

        def pump() -> None:
            for answer in mesh.stream(op, args, first):
                with contextlib.suppress(RuntimeError):  # the event loop has ended
                    loop.call_soon_threadsafe(answers.put_nowait, answer)

        # ``launch`` goes through all agents, so that each is known to run, and its host process notices its death.
        first = 0 if op == "launch" else 1
        if first:
            task = asyncio.ensure_future(ask_own())
            self._asked.add(task)
            task.add_done_callback(self._asked.discard)
        if len(self._hosts) > first:
            threading.Thread(target=pump, name=f"monarch-{op}", daemon=True).start()

    async def _stop_ranks(self, number: int) -> None:
        """Stop the ranks of every host that can be reached, and note their exits. Events stay pending meanwhile.

        A host whose agent is gone stops its ranks by itself. The ranks of a host that is gone are gone too.

        Args:
            number: the signal for the ranks; SIGKILL follows after the grace period.
        """
        if self._mesh is None:
            return
        answers: asyncio.Queue[Any] = asyncio.Queue()
        loop, grace = asyncio.get_running_loop(), self._options.grace
        asked = set(self._members)
        until = loop.time() + grace + _STOP_MARGIN
        self._stream_into(answers, "stop", {"signal": number, "grace": grace})
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
                late = ", ".join(str(replica) for replica in sorted(asked))
                self._reporter.line(f"host {late} did not stop its ranks within {grace + _STOP_MARGIN:g} s")
                break
            answer, getting = getting.result(), asyncio.ensure_future(answers.get())
            if not isinstance(answer, Exception):
                self._note_exits(answer["exits"])
                asked.discard(answer["replica"])  # not from the exits: there are none if no rank was started
        getting.cancel()
        self._members -= {event.replica for event in self._events.pending if isinstance(event, HostLost)}

    def _note_exits(self, exits: list[dict[str, Any]]) -> None:
        for values in exits:
            one = RankExit.from_json(values)
            self._exits[one.rank] = one

    # -- waiting ------------------------------------------------------------------------------------------------------

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args))


def _joined(host: Registration) -> HostJoined:
    return HostJoined(host.replica, JobResult(0, f"{host.name} has joined"))


def _is_loss_of(event: HostEvent, replicas: set[int]) -> bool:
    return isinstance(event, HostLost) and event.replica in replicas


def _raise_if_refused(answer: Any) -> Any:
    """Return the answer of a host.

    Raises:
        HostRefused: the answer is a refusal.
    """
    if isinstance(answer, dict) and "refused" in answer:
        raise HostRefused(answer["refused"], answer["code"])
    return answer


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's text, for an error of a host without the text that Monarch adds."""
    text = str(error).strip()
    if _AGENT_ERROR in text:
        text = text.rpartition(_AGENT_ERROR)[2]
    return text.splitlines()[0] if text else type(error).__name__
