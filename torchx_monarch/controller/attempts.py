# SPDX-License-Identifier: BSD-3-Clause
"""The attempts of one run: start its ranks on all hosts, watch them, and restart them while that may help."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from torchx_monarch.controller import preflight
from torchx_monarch.controller.agreed_stop import AgreedStop, seconds_to_stop
from torchx_monarch.controller.checkpoints import Checkpoints
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
from torchx_monarch.controller.members import Attempt
from torchx_monarch.insight.hangs import Hang
from torchx_monarch.model.backoff import Backoff
from torchx_monarch.model.backoff import describe as describe_delay
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.host_result import forbidden_by
from torchx_monarch.model.host_spec import HostSpec
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


class RankRun:
    """One run of ranks: its attempts, on the same hosts or, when hosts are lost or join, on others.

    ``checkpoints`` are those of the run. Only the hosts know its options, which they return at its begin.
    """

    def __init__(self, hosts: JobHosts, hang_watch: HangWatch) -> None:
        self._spec, self._sizes = hosts.spec, hosts.sizes
        self._begun = RunBegun(nproc=0, run_id="", max_restarts=0, grace=hosts.spec.grace)
        self._hosts = hosts
        self._members = hosts.members
        self._members.attempt = Attempt(hosts.members.attempt.hosts)
        self._events = hosts.events
        self._reporter = hosts.reporter
        self._hang_watch = hang_watch
        self.checkpoints = Checkpoints(hosts)
        self._backoff = Backoff()
        self._same_step = SameStep()
        self._compared = 0  # the formation whose hosts have been compared

    @property
    def _attempt(self) -> Attempt:
        return self._members.attempt

    def continue_after(self, worlds: Sequence[World]) -> None:
        """Continue the attempts of an earlier replica 0, in the last of which hosts have taken part."""
        last = max(worlds, key=lambda world: world.attempt, default=None)
        if last is not None and last.attempt >= self._attempt.number:
            number = last.attempt + 1
            self._members.attempt = Attempt(self._attempt.hosts, number, number, last.restarts_used)

    def advance(self, *, is_restart: bool) -> None:
        """Go on to the next attempt after a change of the hosts, which is a restart unless a host has joined.

        A job that can lose hosts counts only attempts whose ranks had started.
        """
        if self._attempt.world is not None or not self._sizes.can_lose:
            self._members.attempt = self._attempt.next(is_restart=is_restart)

    async def run(self, begun: Mapping[int, RunBegun]) -> JobResult | HostEvent:
        """Run attempts until one has succeeded or no other may help, or until an event ends one, whose ranks still run.

        ``begun`` are the hosts' answers to ``BeginRun``, by replica.

        Raises:
            HostRefused: a host refused a request.
        """
        self._begun, self._attempt.failed_before = begun[0], frozenset()
        until_event, clock = self._hosts.until_event, asyncio.get_running_loop().time
        if difference := await until_event(preflight.check(self._hosts)):
            return difference if isinstance(difference, HostEvent) else JobResult(1, difference)
        while True:
            started = clock()
            if ended := await self._run_attempt(begun):
                return ended
            lived = clock() - started
            if delay := self._backoff.delay(lived):
                self._reporter.line(describe_delay(delay, lived))
                if event := await until_event(asyncio.sleep(delay)):
                    return event

    async def _run_attempt(self, begun: Mapping[int, RunBegun]) -> JobResult | HostEvent | None:
        """Start the ranks, watch them, end them after a failure, and decide; return None if the next attempt is due."""
        until_event = self._hosts.until_event
        if event := await until_event(self._start(begun)):
            return event
        with self._hosts.call(WatchRanks()) as exits:
            failure = await until_event(self._watch(exits))
            if isinstance(failure, HostEvent) and failure.saves:
                failure = await self._stop_at_step(failure, exits)
            if isinstance(failure, (RankExit, Hang)):
                failure = await self._end(failure, exits)
        if isinstance(failure, HostEvent):
            return failure
        if failure is None:
            self._attempt.record_end(self._reporter)
            return JobResult(0, f"all {self._attempt.size} ranks ended with code 0")
        return self._decide(failure)

    async def stop(self, number: int) -> None:
        """Stop the ranks of every host that can be reached with a signal, and record their exits."""
        await self._hosts.stop(number, self._begun.grace)
        self._attempt.record_end(self._reporter)

    # -- start ---------------------------------------------------------------------------------------------------------

    async def _start(self, begun: Mapping[int, RunBegun]) -> HostEvent | None:
        """Start the ranks on all hosts; if a further host has come meanwhile, return that instead."""
        if self._sizes.elastic and (newcomers := self._hosts.gatherer.newcomers()):
            return _joined(newcomers[0])
        attempt, world = self._attempt, await self._new_world(begun)
        if attempt.number > 0:
            await self.checkpoints.restore(world)
        attempt.begin(world)
        for replica, launched in (await self._hosts.ask(LaunchRanks(world), self._spec.host_timeout)).items():
            attempt.hosts[replica].launched = launched
        attempt.report_start(self._reporter, "ranks")
        if self._spec.preflight == "off" and self._compared != self._members.formation:
            self._compared = self._members.formation
            preflight.report_differences(self._hosts)
        return None

    async def _new_world(self, begun: Mapping[int, RunBegun]) -> World:
        attempt = self._attempt
        opening = self._hosts.ask_host(OpenStore(len(attempt.hosts)), 0, self._spec.host_timeout)
        modules = ", ".join(self._spec.preload_modules if self._spec.forks_ranks else ())
        imports = f"the import of {modules}, once for all ranks of a host" if modules else "the ranks' interpreters"
        store = await self._reporter.while_waiting(opening, lambda: imports)
        return World(
            attempt=attempt.number,
            log_attempt=begun[0].first_log_attempt + attempt.number,
            restart_count=attempt.restart_count,
            hosts=HostRange.listed((replica, begun[replica].nproc) for replica in attempt.hosts),
            master_addr=store.address,
            master_port=store.port,
            agent_store=store.served,
            run_id=begun[0].run_id,
            restarts_used=attempt.restarts_used,
        )

    # -- watch ---------------------------------------------------------------------------------------------------------

    async def _watch(self, exits: HostCall[Exits]) -> RankExit | Hang | HostEvent | None:
        """Wait until a rank has failed, ranks hang, or a host joins; None if all ranks have succeeded."""
        watching: list[asyncio.Task[RankExit | Hang | HostEvent | None]] = [
            asyncio.ensure_future(self._first_failure(exits)),
            asyncio.ensure_future(self._hang_watch.run(self._begun.kernel_timeout)),
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
            self._attempt.add(exited)
            if failed := root_cause(exited):
                return failed
        return None

    async def _newcomer(self) -> HostJoined:
        newcomer = await self._hosts.gatherer.newcomer()
        if self._attempt.exits:  # once ranks have ended, a further host is of no use
            await asyncio.Event().wait()
        return _joined(newcomer)

    async def _report_of_stopped(self) -> HostEvent | None:
        """Wait for the report of a host that has stopped its own ranks, after a signal to it; return None if none has.

        The exits may arrive before the report.
        """
        stopped = [rank_exit for rank_exit in self._attempt.exits.values() if rank_exit.stopped_at is not None]
        if not stopped:
            return None
        reason = f"host {stopped[0].replica} has stopped its ranks and not reported why: {stopped[0].describe()}"
        failure = StopRequested(0, JobResult(shell_code(stopped[0].code) or 1, reason))
        return await self._events.report_within(self._spec.lease, failure)

    # -- end -----------------------------------------------------------------------------------------------------------

    async def _stop_at_step(self, event: HostEvent, exits: HostCall[Exits]) -> HostEvent | None:
        """Have ranks that use ``training.steps`` end at one step after an event; return it with how they have ended.

        None if all ranks have succeeded before they came to a step.
        """
        self._events.remove(event)
        grace, seconds = self._begun.grace, seconds_to_stop(self._begun.grace)
        stop, failed = AgreedStop(self._hosts, seconds), None
        if not await stop.is_used():
            is_asked_for = isinstance(event, StopRequested)
            return _explained(event, "not saved: its program uses no torchx_monarch.steps") if is_asked_for else event
        self._reporter.line(f"{event.result.reason}: the ranks end at one step, within {seconds:g} s")
        agreeing = asyncio.ensure_future(stop.run())
        agreeing.add_done_callback(lambda done: done.cancelled() or done.exception())
        with contextlib.suppress(HostError, asyncio.TimeoutError):
            failed = await self._events.until_event(self._until_failure(exits), lambda other: not other.saves, seconds)
        agreeing.cancel()
        exited = self._attempt.exits.values()
        if len(exited) == self._attempt.size and not any(ended.code or ended.stopped_at for ended in exited):
            how = f"stopped at {stop.step}, saved"
            if not stop.is_agreed:
                return None
        elif isinstance(failed, RankExit):
            how = f"not saved: {failed.describe()}"
        else:
            left = await stop.describe_left()
            how = f"not saved: {left} within {seconds:g} s" if left else "not saved"
        await self._hosts.stop(event.signal, grace - seconds)
        return _explained(event, how)

    async def _end(self, failure: RankExit | Hang, exits: HostCall[Exits]) -> RankExit | HostEvent:
        """Stop the ranks after a failure; return its cause, a rank or the event of a host. Events stay pending."""
        if isinstance(failure, Hang):
            return await self._end_hang(failure)
        if failure.is_early:
            adding = asyncio.ensure_future(self._add_further(exits))
            await self._events.until_event(asyncio.wait([adding], timeout=EARLY_FAILURES_WITHIN))
            adding.cancel()
        stopping = asyncio.ensure_future(self.stop(signal.SIGTERM))
        await asyncio.wait([stopping], timeout=_REPORTED_WITHIN)
        if cause := self._attempt.cause:
            reason = self._attempt.failure(cause).reason
            self._reporter.report("failure", reason, rank=cause.rank, failed_at=cause.failed_at)
        await stopping
        # Ranks that had failed before the stop have reported their exits by now.
        cause = self._attempt.cause or failure
        return self._event_behind(cause) or cause

    async def _add_further(self, exits: HostCall[Exits]) -> None:
        async for _, exited in exits:
            if not isinstance(exited, HostError):
                self._attempt.add(exited)

    def _event_behind(self, failed: RankExit) -> HostEvent | None:
        """Return the pending event that may have caused the failure of a rank, if there is one.

        Ranks may notice the loss of a host before the controller does.
        """
        pending = self._events.pending
        if self._sizes.can_lose:
            leaves = (HostLost, HostPreempted)
            return next((event for event in pending if event.replica != 0 and isinstance(event, leaves)), None)
        if failed.is_collateral or self._attempt.restarts_used < self._begun.max_restarts:
            # Stop requests first: they end the job.
            return min(pending, key=lambda event: isinstance(event, HostLost), default=None)
        return None

    async def _end_hang(self, hang: Hang) -> RankExit:
        """Stop ranks that hang; return the exit of the first of those for which the others wait, as the root cause."""
        now, rank = time.time(), hang.ranks[0]
        await self.stop(signal.SIGTERM)
        # The exits of a host that was lost meanwhile are not known.
        exited = self._attempt.exits.get(rank) or self._unknown_exit(rank, now)
        cause = dataclasses.replace(exited, code=1, time=now, stopped_at=None, error=None, hang=hang.describe())
        self._attempt.exits[rank] = cause
        self._reporter.report("failure", cause.describe(), rank=rank, failed_at=now)
        return cause

    def _unknown_exit(self, rank: int, now: float) -> RankExit:
        assert (world := self._attempt.world) is not None
        replica = world.replica_of(rank)
        name = self._attempt.hosts[replica].host.name
        local_rank = rank - world.place(replica).first_rank
        return RankExit(rank, local_rank, replica, hostname=name, pid=0, code=1, time=now)

    # -- decide --------------------------------------------------------------------------------------------------------

    def _decide(self, cause: RankExit) -> JobResult | HostExcluded | None:
        """Return the result of the run after a failed attempt; None if the next attempt is due.

        That is an event if another host is to take the place of one in the next attempt.
        """
        exits, budget = self._attempt.exits.values(), self._begun.max_restarts
        failure = self._attempt.failure(cause)
        for line in describe_others(exits, cause):
            self._reporter.line(f"also: {line}")
        stuck = self._same_step.why_not(exits, cause, self._spec.same_step_limit)
        if excluded := self._count_failure(cause, failure.reason):
            self._same_step, stuck = SameStep(), ""  # other machines may get further
        reason = why_no_restart(cause, self._attempt.never_joined, self._attempt.failed_before, self._spec) or stuck
        if self._attempt.restarts_used >= budget:
            return failure
        if reason:
            self._reporter.line(f"no restart: {reason}")
            return failure
        self._members.attempt = self._attempt.next(is_charged=True)
        self._reporter.restarted(
            f"restart {self._attempt.restarts_used} of {budget} after: {failure.reason}",
            attempt=self._attempt.number,
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
        alike = failed_alike(self._attempt.exits.values(), cause)
        if {self._attempt.exits[rank].replica for rank in alike} == self._attempt.hosts.keys():
            return None
        return self._hosts.gatherer.blame(cause.replica, "failed_alone", failure)


def _explained(event: HostEvent, how: str) -> HostEvent:
    result = dataclasses.replace(event.result, reason=f"{event.result.reason}; {how}")
    return dataclasses.replace(event, result=result)


def _joined(host: Registration) -> HostJoined:
    return HostJoined(host.replica, JobResult(0, f"{host.name} has joined"))


class SameStep:
    """Count failures in a row at one step of the program, for programs that report their steps.

    Ranks of a synchronous program may have reported different steps when one of them fails, so a failure one step
    before the furthest one is a failure at the same step.
    """

    def __init__(self) -> None:
        self._furthest = -1
        self._in_a_row = 0

    def why_not(self, exits: Iterable[RankExit], cause: RankExit, limit: int) -> str:
        """Return why the ranks must not be restarted after ``limit`` failures at a step (0: any); empty if they may be.

        The step of the root cause counts, or the furthest if it has reported none.
        """
        step = cause.step
        if step is None:
            step = max((rank_exit.step for rank_exit in exits if rank_exit.step is not None), default=None)
        if step is None:
            return ""
        if self._furthest - 1 <= step <= self._furthest:
            self._in_a_row += 1
        else:
            self._furthest, self._in_a_row = step, 1
        if limit <= 0 or self._in_a_row < limit:
            return ""
        return f"{self._in_a_row} failures in a row at step {self._furthest}, without progress (same_step_limit)"


def why_no_restart(cause: RankExit, failed_now: Collection[int], failed_before: Collection[int], spec: HostSpec) -> str:
    """Return why the ranks must not be restarted; empty if they may be.

    ``failed_now`` and ``failed_before`` are the ranks that have never joined, of this and the previous attempt.
    """
    if cause.hang:
        return "" if spec.on_hang == "restart" else f"the ranks hung (on_hang={spec.on_hang})"
    code = shell_code(cause.code)
    if not cause.began:
        return "the program cannot even begin"
    if reason := forbidden_by(code, spec.retry_on):
        return reason
    again = set(failed_now) & set(failed_before)
    if cause.rank in failed_now and again:
        return f"rank {min(again)} has failed twice in a row before it was in a process group"
    return ""
