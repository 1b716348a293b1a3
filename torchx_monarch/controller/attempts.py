# SPDX-License-Identifier: BSD-3-Clause
"""The attempts of one run: start its ranks on all hosts, watch them, and restart them while that may help."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import time
from collections.abc import AsyncIterator, Collection, Iterable, Mapping

from torchx_monarch.controller.elastic import HostGatherer
from torchx_monarch.controller.hang_watch import HangWatch
from torchx_monarch.controller.host_events import (
    HostEvent,
    HostExcluded,
    HostJoined,
    HostLost,
    HostPreempted,
    Interrupted,
    StopRequested,
)
from torchx_monarch.controller.host_messages import Exits, HostRefused, LaunchRanks, OpenStore, RunBegun, WatchRanks
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.controller.preflight import Preflight
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
    describe_failure,
    describe_others,
    exit_records,
    failed_alike,
    root_cause,
    shell_code,
)
from torchx_monarch.model.world import World

_REPORTED_WITHIN = 0.5
"""Seconds for which the line about a failure waits for the exits of the other ranks, which are being stopped by then.
Ranks that cannot start all fail within milliseconds, and the line is to name one cause."""


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One attempt of a run.

    Attributes:
        number: counts all attempts of the run, from 0.
        restart_count: TORCHELASTIC_RESTART_COUNT; as under torchrun, a host that joins adds none.
        launched: whether its ranks may have started.
        exits: those of its ranks, by rank; before it is launched, those of the attempt before.
    """

    number: int = 0
    restart_count: int = 0
    launched: bool = False
    exits: dict[int, RankExit] = dataclasses.field(default_factory=dict)

    def next(self, *, is_restart: bool = True) -> Attempt:
        return dataclasses.replace(
            self, number=self.number + 1, restart_count=self.restart_count + is_restart, launched=False
        )


class Attempts:
    """Run the attempts of one run, on one mesh or, when hosts are lost or join, on several.

    ``current`` is the present attempt. Only the hosts know the options of the run, which they return at its begin.
    """

    def __init__(self, hosts: JobHosts, gatherer: HostGatherer, hang_watch: HangWatch) -> None:
        self.current = Attempt()
        self._options = hosts.options
        self._begun: RunBegun | None = None
        self._hosts = hosts
        self._gatherer = gatherer
        self._events = hosts.events
        self._reporter = hosts.reporter
        self._hang_watch = hang_watch
        self._preflight = Preflight(hosts)
        self._recorded = -1
        self._restarts_left = 0
        self._backoff = Backoff()
        self._unjoined = frozenset[int]()
        self._same_step = SameStep()

    def continue_after(self, number: int) -> None:
        """Continue the attempts of an earlier replica 0, the last of which had this number; -1 for none."""
        if number >= self.current.number:
            self.current = Attempt(number + 1, number + 1)

    def hosts_changed(self, joined: bool) -> None:
        """Count the attempt that a change of the hosts has ended; ``joined`` says that a host has joined, and not left.

        A job that can lose hosts counts only attempts whose ranks had started.
        """
        if self.current.launched or not self._options.sizes.can_lose:
            self.current = self.current.next(is_restart=not joined)

    async def run(self, hosts: list[Registration], begun: Mapping[int, RunBegun]) -> JobResult:
        """Run attempts until one has succeeded or no other may help; return the result.

        ``begun`` are the hosts' answers to ``BeginRun``, by replica.

        Raises:
            Interrupted: an event is pending; the ranks still run.
            HostRefused: a host refused a request.
        """
        if self._begun is None:
            self._restarts_left = begun[0].max_restarts
        self._begun, self._unjoined = begun[0], frozenset()
        if reason := await self._preflight.check(hosts):
            return JobResult(1, reason)
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            world = await self._launch(hosts, begun)
            cause = await self._watch(world)
            if cause is None:
                self._record_exits()
                return JobResult(0, f"all {world.size} ranks ended with code 0")
            if result := self._decide(cause, world):
                return result
            lived = clock() - began
            if delay := self._backoff.delay(lived):
                self._reporter.line(describe_delay(delay, lived))
                await self._events.interrupt(asyncio.sleep(delay))

    def _decide(self, cause: RankExit, world: World) -> JobResult | None:
        """Return the result of the run after a failed attempt, or None, and begin the next if that may help.

        Raises:
            Interrupted: a host is excluded.
        """
        assert self._begun is not None
        exits, budget = self.current.exits.values(), self._begun.max_restarts
        failure = describe_failure(exits, cause, world.size)
        for line in describe_others(exits, cause):
            self._reporter.line(f"also: {line}")
        stuck = self._same_step.why_not(exits, cause, self._options.spec.same_step_limit)
        before, self._unjoined = self._unjoined, never_joined(exits)
        if excluded := self._count_failure(cause, failure):
            self._same_step, stuck = SameStep(), ""  # other machines may get further
        reason = why_no_restart(cause, self._unjoined, before, self._options.spec) or stuck
        if self._restarts_left == 0 or reason:
            if self._restarts_left:
                self._reporter.line(f"no restart: {reason}")
            return JobResult(shell_code(cause.code), failure, cause)
        self._restarts_left -= 1
        self.current = self.current.next()
        self._reporter.restarted(
            f"restart {budget - self._restarts_left} of {budget} after: {failure}",
            attempt=self.current.number,
            rank=cause.rank,
            code=cause.code,
            max_restarts=budget,
            reason=failure,
        )
        if excluded is not None:
            raise Interrupted(excluded)
        return None

    async def stop(self, number: int) -> None:
        """Stop the ranks of every host that can be reached with a signal, and record their exits."""
        grace = self._options.spec.grace if self._begun is None else self._begun.grace
        await self._hosts.stop(number, grace, self._add_exits)
        self._record_exits()

    async def _launch(self, hosts: list[Registration], begun: Mapping[int, RunBegun]) -> World:
        """Start the ranks on all hosts."""
        if self._options.sizes.elastic and (newcomers := self._gatherer.newcomers()):
            raise Interrupted(_joined(newcomers[0]))
        world = await self._world(hosts, begun)
        self.current = dataclasses.replace(self.current, launched=True, exits={})
        launched = dict([found async for found in self._hosts.ask(LaunchRanks(world), self._options.spec.host_timeout)])
        names = {host.replica: host.hostname for host in hosts}
        shown = [
            {
                "replica": replica,
                "name": names[replica],
                "first_rank": world.first_rank(replica),
                "pids": answer.pids,
                "imported": answer.imported,
                "unshared": answer.unshared,
            }
            for replica, answer in sorted(launched.items())
        ]
        text = f"ranks {world.size}/{world.size}"
        self._reporter.phase(
            "ranks", text, attempt=world.attempt, log_attempt=world.log_attempt, count=world.size, hosts=shown
        )
        self._preflight.report_differences(hosts, {replica: answer.facts for replica, answer in launched.items()})
        return world

    async def _watch(self, world: World) -> RankExit | None:
        """Wait for the end of the ranks, and end them after a failure; return its root cause, None if all succeeded."""
        hanging = asyncio.ensure_future(self._hang_watch.run(world.attempt))
        ending = asyncio.ensure_future(self._end(world.size, hanging))
        try:
            await asyncio.wait([hanging, ending], return_when=asyncio.FIRST_COMPLETED)
            if not ending.done() and not hanging.cancelled():
                ending.cancel()
                return await self._end_hang(hanging.result(), world)
            return await ending
        finally:
            hanging.cancel()
            ending.cancel()

    async def _end(self, world_size: int, hanging: asyncio.Future[Hang]) -> RankExit | None:
        """Wait for the end of the ranks; stop the others when one has failed. Return the root cause, or None."""
        growth = asyncio.ensure_future(self._report_newcomer())
        try:
            async with contextlib.aclosing(self._hosts.ask(WatchRanks())) as answers:
                async for _, exited in answers:
                    self._add_exits(exited)
                    growth.cancel()  # once the ranks of a host have ended, a further host is of no use
                    if first := root_cause(exited):
                        break
                else:
                    await self._report_of_stopped()
                    return None
                hanging.cancel()
                if first.is_early:
                    await self._add_early_failures(answers)
        finally:
            growth.cancel()
        await self._stop_others(world_size)
        # Ranks that had failed before the stop have reported their exits by now.
        cause = root_cause(self.current.exits.values())
        self._raise_cause(cause)
        return cause

    async def _add_early_failures(self, answers: AsyncIterator[tuple[int, Exits]]) -> None:

        async def add() -> None:
            async for _, exited in answers:
                self._add_exits(exited)

        with contextlib.suppress(asyncio.TimeoutError, Interrupted, HostRefused):  # an event stays pending
            await asyncio.wait_for(add(), EARLY_FAILURES_WITHIN)

    async def _end_hang(self, hang: Hang, world: World) -> RankExit:
        """Stop ranks that hang; return the exit of the first of those for which the others wait, as the root cause."""
        now = time.time()
        await self.stop(signal.SIGTERM)
        rank = hang.ranks[0]
        # The exits of a host that was lost meanwhile are not known.
        exited = self.current.exits.get(rank) or self._unknown_exit(rank, world, now)
        cause = dataclasses.replace(exited, code=1, time=now, stopped_at=None, error=None, hang=hang.describe())
        self.current.exits[rank] = cause
        self._reporter.report("failure", cause.describe(), rank=rank, failed_at=now)
        return cause

    def _unknown_exit(self, rank: int, world: World, now: float) -> RankExit:
        replica = next(replica for replica in reversed(world.replicas) if world.first_rank(replica) <= rank)
        name = self._hosts.members.attempt[replica].name
        local_rank = rank - world.first_rank(replica)
        return RankExit(rank, local_rank, replica, hostname=name, pid=0, code=1, time=now)

    async def _world(self, hosts: list[Registration], begun: Mapping[int, RunBegun]) -> World:
        options = self._options
        opening = self._hosts.ask_own(
            OpenStore(options.store_bind, options.master_addr, len(hosts)), options.spec.host_timeout
        )
        modules = ", ".join(options.spec.preload_modules if options.spec.forks_ranks else ())
        imports = f"the import of {modules}, once for all ranks of a host" if modules else "the ranks' interpreters"
        store = await self._reporter.while_waiting(opening, lambda: imports)
        return World(
            attempt=self.current.number,
            log_attempt=begun[0].first_log_attempt + self.current.number,
            restart_count=self.current.restart_count,
            replicas=tuple(host.replica for host in hosts),
            local_world_sizes=tuple(begun[host.replica].nproc for host in hosts),
            master_addr=store.address,
            master_port=store.port,
            agent_store=store.served,
            run_id=begun[0].run_id,
        )

    async def _report_of_stopped(self) -> None:
        """Wait for the report of a host that has stopped its own ranks, after a signal to it; return if none has.

        The exits may arrive before the report.
        """
        stopped = [rank_exit for rank_exit in self.current.exits.values() if rank_exit.stopped_at is not None]
        if not stopped:
            return
        reason = f"host {stopped[0].replica} has stopped its ranks and not reported why: {stopped[0].describe()}"
        failure = StopRequested(0, JobResult(shell_code(stopped[0].code) or 1, reason))
        raise Interrupted(await self._events.report_within(self._options.spec.lease, failure))

    async def _stop_others(self, world_size: int) -> None:
        """Stop the ranks after one has failed; write the failure to the log before the last of them has ended."""
        stopping = asyncio.ensure_future(self.stop(signal.SIGTERM))
        try:
            await asyncio.wait([stopping], timeout=_REPORTED_WITHIN)
            if cause := root_cause(self.current.exits.values()):
                self._reporter.report(
                    "failure",
                    describe_failure(self.current.exits.values(), cause, world_size),
                    rank=cause.rank,
                    failed_at=cause.failed_at,
                )
            await stopping
        finally:
            stopping.cancel()

    def _record_exits(self) -> None:
        """Report the exits of the attempt's ranks as an event, once; nothing if its ranks have not started."""
        attempt = self.current
        if attempt.exits and attempt.launched and attempt.number != self._recorded:
            self._recorded = attempt.number
            exits = exit_records(attempt.exits, root_cause(attempt.exits.values()))
            text = f"the ranks of attempt {attempt.number + 1} have ended"
            self._reporter.record("attempt_end", text, attempt=attempt.number, exits=exits)

    def _add_exits(self, exited: Exits) -> None:
        self.current.exits.update({rank_exit.rank: rank_exit for rank_exit in exited})

    def _count_failure(self, cause: RankExit, failure: str) -> HostExcluded | None:
        """Count a failure of the ranks for the host of its root cause; return the event that excludes the host.

        A failure that all hosts share is not counted: another host would not help.
        """
        alike = failed_alike(self.current.exits.values(), cause)
        if {self.current.exits[rank].replica for rank in alike} == self._hosts.members.attempt.keys():
            return None
        return self._gatherer.blame(cause.replica, failure)

    def _raise_cause(self, cause: RankExit | None) -> None:
        """Raise the pending event that may have caused the failure of a rank, if there is one.

        Ranks may notice the loss of a host before the controller does.
        """
        blamed: list[HostEvent] = []
        if self._options.sizes.can_lose:
            leaves = (HostLost, HostPreempted)
            blamed = [event for event in self._events.pending if event.replica != 0 and isinstance(event, leaves)]
        elif cause is None or cause.is_collateral or self._restarts_left:
            # Stop requests first: they end the job.
            blamed = sorted(self._events.pending, key=lambda event: isinstance(event, HostLost))
        if blamed:
            raise Interrupted(blamed[0])

    async def _report_newcomer(self) -> None:
        if self._options.sizes.elastic:
            self._events.post(_joined(await self._gatherer.newcomer()))


def _joined(host: Registration) -> HostJoined:
    return HostJoined(host.replica, JobResult(0, f"{host.name} has joined"))


# -- whether another attempt may help ----------------------------------------------------------------------------------


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


def never_joined(exits: Iterable[RankExit]) -> frozenset[int]:
    """Return the ranks that failed while forming their first process group."""
    return frozenset(rank_exit.rank for rank_exit in exits if rank_exit.failed and rank_exit.joined is False)


def why_no_restart(cause: RankExit, failed_now: Collection[int], failed_before: Collection[int], spec: HostSpec) -> str:
    """Return why the ranks must not be restarted; empty if they may be.

    ``failed_now`` and ``failed_before`` are the results of ``never_joined`` for this and the previous attempt.
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
