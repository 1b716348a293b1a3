# SPDX-License-Identifier: BSD-3-Clause
"""The attempts of one run: start its ranks on all hosts, watch them, and restart them while that may help."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import time
from collections.abc import Mapping, Sequence

from torchx_monarch.controller.agreed_stop import AgreedStop, seconds_to_stop
from torchx_monarch.controller.attempt import Attempt, SameStep, never_joined, why_no_restart
from torchx_monarch.controller.checkpoints import Checkpoints
from torchx_monarch.controller.elastic import HostGatherer
from torchx_monarch.controller.hang_watch import HangWatch
from torchx_monarch.controller.host_events import (
    HostEvent,
    HostExcluded,
    HostJoined,
    HostLost,
    HostPreempted,
    StopRequested,
)
from torchx_monarch.controller.host_messages import (
    Exits,
    HostCall,
    HostError,
    LaunchRanks,
    OpenStore,
    RunBegun,
    WatchRanks,
)
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.controller.preflight import Preflight
from torchx_monarch.insight.hangs import Hang
from torchx_monarch.model.backoff import Backoff
from torchx_monarch.model.backoff import describe as describe_delay
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.job_result import (
    EARLY_FAILURES_WITHIN,
    JobResult,
    RankExit,
    describe_others,
    failed_alike,
    root_cause,
    shell_code,
)
from torchx_monarch.model.world import HostRange, World

_REPORTED_WITHIN = 0.5
"""Seconds for which the line about a failure waits for the exits of the other ranks, which are being stopped by then.
Ranks that cannot start all fail within milliseconds, and the line is to name one cause."""


class Attempts:
    """Run the attempts of one run, on one mesh or, when hosts are lost or join, on several.

    ``current`` is the present attempt, ``checkpoints`` are those of the run. Only the hosts know the options of the
    run, which they return at its begin.
    """

    def __init__(self, hosts: JobHosts, gatherer: HostGatherer, hang_watch: HangWatch) -> None:
        self.current = Attempt()
        self._spec, self._sizes = hosts.spec, hosts.sizes
        self._begun: RunBegun | None = None
        self._hosts = hosts
        self._members = hosts.members
        self._gatherer = gatherer
        self._events = hosts.events
        self._reporter = hosts.reporter
        self._hang_watch = hang_watch
        self._preflight = Preflight(hosts)
        self.checkpoints = Checkpoints(hosts)
        self._backoff = Backoff()
        self._never_joined = frozenset[int]()
        self._same_step = SameStep()

    def continue_after(self, worlds: Sequence[World]) -> None:
        """Continue the attempts of an earlier replica 0, in the last of which hosts have taken part."""
        last = max(worlds, key=lambda world: world.attempt, default=None)
        if last is not None and last.attempt >= self.current.number:
            self.current = Attempt(last.attempt + 1, last.attempt + 1, last.restarts_used)

    def advance(self, *, is_restart: bool) -> None:
        """Go on to the next attempt after a change of the hosts, which is a restart unless a host has joined.

        A job that can lose hosts counts only attempts whose ranks had started.
        """
        if self.current.has_begun or not self._sizes.can_lose:
            self.current = self.current.next(is_restart=is_restart)

    async def run(self, begun: Mapping[int, RunBegun]) -> JobResult | HostEvent:
        """Run attempts until one has succeeded or no other may help, or until an event ends one, whose ranks still run.

        ``begun`` are the hosts' answers to ``BeginRun``, by replica.

        Raises:
            HostRefused: a host refused a request.
        """
        self._begun, self._never_joined = begun[0], frozenset()
        until_event, clock = self._hosts.until_event, asyncio.get_running_loop().time
        if difference := await until_event(self._preflight.check()):
            return difference if isinstance(difference, HostEvent) else JobResult(1, difference)
        while True:
            started = clock()
            world = await until_event(self._start(begun))
            if isinstance(world, HostEvent):
                return world
            with self._hosts.call(WatchRanks()) as exits:
                failure = await until_event(self._watch(exits, world))
                if isinstance(failure, HostEvent) and failure.saves:
                    failure = await self._stop_at_step(failure, exits, world)
                if isinstance(failure, (RankExit, Hang)):
                    failure = await self._end(failure, exits, world)
            if isinstance(failure, HostEvent):
                return failure
            if failure is None:
                self.current.record_end(self._reporter)
                return JobResult(0, f"all {world.size} ranks ended with code 0")
            if ended := self._decide(failure, world):
                return ended
            lived = clock() - started
            if delay := self._backoff.delay(lived):
                self._reporter.line(describe_delay(delay, lived))
                if event := await until_event(asyncio.sleep(delay)):
                    return event

    async def stop(self, number: int) -> None:
        """Stop the ranks of every host that can be reached with a signal, and record their exits."""
        grace = self._spec.grace if self._begun is None else self._begun.grace
        await self._hosts.stop(number, grace, self.current.add)
        self.current.record_end(self._reporter)

    # -- start ---------------------------------------------------------------------------------------------------------

    async def _start(self, begun: Mapping[int, RunBegun]) -> World | HostEvent:
        """Start the ranks on all hosts, unless a further one has come meanwhile."""
        if self._sizes.elastic and (newcomers := self._gatherer.newcomers()):
            return _joined(newcomers[0])
        world = await self._world(begun)
        if self.current.number > 0:
            await self.checkpoints.restore(world)
        self.current.begin()
        self._hosts.world = world
        for replica, launched in (await self._hosts.ask(LaunchRanks(world), self._spec.host_timeout)).items():
            self._members.attempt[replica].launched = launched
        self.current.report_start(self._reporter, "ranks", world, self._members.attempt.values())
        self._preflight.report_differences()
        return world

    async def _world(self, begun: Mapping[int, RunBegun]) -> World:
        network, members = self._hosts.rendezvous.network, self._members
        request = OpenStore(network.bind, network.advertised, len(members.attempt))
        opening = self._hosts.ask(request, self._spec.host_timeout, replicas=[0])
        modules = ", ".join(self._spec.preload_modules if self._spec.forks_ranks else ())
        imports = f"the import of {modules}, once for all ranks of a host" if modules else "the ranks' interpreters"
        store = (await self._reporter.while_waiting(opening, lambda: imports))[0]
        return World(
            attempt=self.current.number,
            log_attempt=begun[0].first_log_attempt + self.current.number,
            restart_count=self.current.restart_count,
            hosts=HostRange.listed((replica, begun[replica].nproc) for replica in members.attempt),
            master_addr=store.address,
            master_port=store.port,
            agent_store=store.served,
            run_id=begun[0].run_id,
            restarts_used=self.current.restarts_used,
        )

    # -- watch ---------------------------------------------------------------------------------------------------------

    async def _watch(self, exits: HostCall[Exits], world: World) -> RankExit | Hang | HostEvent | None:
        """Wait until a rank has failed, ranks hang, or a host joins; None if all ranks have succeeded."""
        assert self._begun is not None
        watching: list[asyncio.Task[RankExit | Hang | HostEvent | None]] = [
            asyncio.ensure_future(self._first_failure(exits)),
            asyncio.ensure_future(self._hang_watch.run(world.attempt, self._begun.kernel_timeout)),
            asyncio.ensure_future(self.checkpoints.follow()),
        ]
        if self._sizes.elastic:
            watching.append(asyncio.ensure_future(self._newcomer()))
        try:
            done, _ = await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
            return next(task for task in watching if task in done).result()
        finally:
            for task in watching:
                task.cancel()
            await asyncio.wait(watching)

    async def _first_failure(self, exits: HostCall[Exits]) -> RankExit | HostEvent | None:
        return await self._until_failure(exits) or await self._report_of_stopped()

    async def _until_failure(self, exits: HostCall[Exits]) -> RankExit | None:
        """Wait until a rank has failed, and return its exit; None if all ranks have ended without a failure."""
        async for _, exited in exits:
            if isinstance(exited, HostError):
                raise exited
            self.current.add(exited)
            if failed := root_cause(exited):
                return failed
        return None

    async def _newcomer(self) -> HostJoined:
        newcomer = await self._gatherer.newcomer()
        if self.current.exits:  # once ranks have ended, a further host is of no use
            await asyncio.Event().wait()
        return _joined(newcomer)

    async def _report_of_stopped(self) -> HostEvent | None:
        """Wait for the report of a host that has stopped its own ranks, after a signal to it; return None if none has.

        The exits may arrive before the report.
        """
        stopped = [rank_exit for rank_exit in self.current.exits.values() if rank_exit.stopped_at is not None]
        if not stopped:
            return None
        reason = f"host {stopped[0].replica} has stopped its ranks and not reported why: {stopped[0].describe()}"
        failure = StopRequested(0, JobResult(shell_code(stopped[0].code) or 1, reason))
        return await self._events.report_within(self._spec.lease, failure)

    # -- end -----------------------------------------------------------------------------------------------------------

    async def _stop_at_step(self, event: HostEvent, exits: HostCall[Exits], world: World) -> HostEvent | None:
        """Have ranks that use ``training.steps`` end at one step after an event; return it with how they have ended.

        None if all ranks have succeeded before they came to a step.
        """
        assert self._begun is not None
        self._events.remove(event)
        grace, seconds = self._begun.grace, seconds_to_stop(self._begun.grace)
        stop, failed = AgreedStop(self._hosts, seconds), None
        if not await stop.is_used():
            return event
        self._reporter.line(f"{event.result.reason}: the ranks end at one step, within {seconds:g} s")
        agreeing = asyncio.ensure_future(stop.run())
        agreeing.add_done_callback(lambda done: done.cancelled() or done.exception())
        with contextlib.suppress(HostError, asyncio.TimeoutError):
            failed = await self._events.until_event(self._until_failure(exits), lambda other: not other.saves, seconds)
        agreeing.cancel()
        exited = self.current.exits.values()
        if len(exited) == world.size and not any(ended.code or ended.stopped_at for ended in exited):
            how = f"stopped at {stop.step}, saved"
            if not stop.is_agreed:
                return None
        elif isinstance(failed, RankExit):
            how = f"not saved: {failed.describe()}"
        else:
            left = await stop.describe_left()
            how = f"not saved: {left} within {seconds:g} s" if left else "not saved"
        await self._hosts.stop(event.signal, grace - seconds, self.current.add)
        return dataclasses.replace(
            event, result=dataclasses.replace(event.result, reason=f"{event.result.reason}; {how}")
        )

    async def _end(self, failure: RankExit | Hang, exits: HostCall[Exits], world: World) -> RankExit | HostEvent:
        """Stop the ranks after a failure; return its cause, a rank or the event of a host. Events stay pending."""
        if isinstance(failure, Hang):
            return await self._end_hang(failure, world)
        if failure.is_early:
            adding = asyncio.ensure_future(self._add_further(exits))
            await self._events.until_event(asyncio.wait([adding], timeout=EARLY_FAILURES_WITHIN))
            adding.cancel()
        stopping = asyncio.ensure_future(self.stop(signal.SIGTERM))
        await asyncio.wait([stopping], timeout=_REPORTED_WITHIN)
        if cause := self.current.cause:
            reason = self.current.failure(cause, world.size).reason
            self._reporter.report("failure", reason, rank=cause.rank, failed_at=cause.failed_at)
        await stopping
        # Ranks that had failed before the stop have reported their exits by now.
        cause = self.current.cause or failure
        return self._event_behind(cause) or cause

    async def _add_further(self, exits: HostCall[Exits]) -> None:
        async for _, exited in exits:
            if not isinstance(exited, HostError):
                self.current.add(exited)

    def _event_behind(self, failed: RankExit) -> HostEvent | None:
        """Return the pending event that may have caused the failure of a rank, if there is one.

        Ranks may notice the loss of a host before the controller does.
        """
        pending = self._events.pending
        if self._sizes.can_lose:
            leaves = (HostLost, HostPreempted)
            return next((event for event in pending if event.replica != 0 and isinstance(event, leaves)), None)
        assert self._begun is not None
        if failed.is_collateral or self.current.restarts_used < self._begun.max_restarts:
            # Stop requests first: they end the job.
            return min(pending, key=lambda event: isinstance(event, HostLost), default=None)
        return None

    async def _end_hang(self, hang: Hang, world: World) -> RankExit:
        """Stop ranks that hang; return the exit of the first of those for which the others wait, as the root cause."""
        now, rank = time.time(), hang.ranks[0]
        await self.stop(signal.SIGTERM)
        # The exits of a host that was lost meanwhile are not known.
        exited = self.current.exits.get(rank) or self._unknown_exit(rank, world, now)
        cause = dataclasses.replace(exited, code=1, time=now, stopped_at=None, error=None, hang=hang.describe())
        self.current.exits[rank] = cause
        self._reporter.report("failure", cause.describe(), rank=rank, failed_at=now)
        return cause

    def _unknown_exit(self, rank: int, world: World, now: float) -> RankExit:
        replica = world.replica_of(rank)
        name = self._members.attempt[replica].host.name
        local_rank = rank - world.place(replica).first_rank
        return RankExit(rank, local_rank, replica, hostname=name, pid=0, code=1, time=now)

    # -- decide --------------------------------------------------------------------------------------------------------

    def _decide(self, cause: RankExit, world: World) -> JobResult | HostExcluded | None:
        """Return the result of the run after a failed attempt; None if the next attempt is due.

        That is an event if another host is to take the place of one in the next attempt.
        """
        assert self._begun is not None
        exits, budget = self.current.exits.values(), self._begun.max_restarts
        failure = self.current.failure(cause, world.size)
        for line in describe_others(exits, cause):
            self._reporter.line(f"also: {line}")
        stuck = self._same_step.why_not(exits, cause, self._spec.same_step_limit)
        before, self._never_joined = self._never_joined, never_joined(exits)
        if excluded := self._count_failure(cause, failure.reason):
            self._same_step, stuck = SameStep(), ""  # other machines may get further
        reason = why_no_restart(cause, self._never_joined, before, self._spec) or stuck
        if self.current.restarts_used >= budget:
            return failure
        if reason:
            self._reporter.line(f"no restart: {reason}")
            return failure
        self.current = self.current.next(is_charged=True)
        self._reporter.restarted(
            f"restart {self.current.restarts_used} of {budget} after: {failure.reason}",
            attempt=self.current.number,
            rank=cause.rank,
            code=cause.code,
            max_restarts=budget,
            reason=failure.reason,
        )
        return excluded

    def _count_failure(self, cause: RankExit, failure: str) -> HostExcluded | None:
        """Count a failure of the ranks for the host of its root cause; return the event that excludes the host.

        A failure that all hosts share is not counted: another host would not help.
        """
        alike = failed_alike(self.current.exits.values(), cause)
        if {self.current.exits[rank].replica for rank in alike} == self._members.attempt.keys():
            return None
        return self._gatherer.blame(cause.replica, "failed_alone", failure)


def _joined(host: Registration) -> HostJoined:
    return HostJoined(host.replica, JobResult(0, f"{host.name} has joined"))
