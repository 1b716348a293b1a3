# SPDX-License-Identifier: BSD-3-Clause
"""The table of the hosts of a role, and their present attempt, on replica 0: all that it decides reads this table."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from torchx_monarch.controller.host_events import Changes
from torchx_monarch.controller.host_messages import CheckpointParts, Exits, HostCall, HostError, Launched
from torchx_monarch.insight.events import HostStart, RankEnd
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.job_result import (
    JobResult,
    RankExit,
    describe_failure,
    root_cause,
    shell_code,
    steps_of_all,
)
from torchx_monarch.model.world import World
from torchx_monarch.transport import messages
from torchx_monarch.transport.channel import Channel


class MemberState(enum.Enum):
    """What replica 0 knows of a host."""

    REFUSED = "it cannot start, and the job goes on without it"
    UNABLE = "it is registered, and cannot start, which ends the job"
    ABLE = "it is registered, and can take part in attempts"
    DISMISSED = "it has been sent its own result, and another host of its replica may register"
    LOST = "its channel has ended, or another host of its replica has its place"


@dataclasses.dataclass(eq=False, slots=True)
class Member:
    """A host.

    Attributes:
        channel: to it; None for replica 0's own host, and for one that is refused or lost.
        knows_result: whether it has been sent the result of the job.
        checkpoints: the last report of the parts of checkpoints that it has.
        calls: the requests that it has not answered, by number.
        following: follows its command, or reads its output of the present run of a live allocation.
        launched: what it has started in the present attempt; None before it has said so.
        is_spared: whether its command has failed for good, and the role does not need it.
    """

    host: Registration
    state: MemberState
    channel: Channel | None = None
    knows_result: bool = False
    checkpoints: CheckpointParts = CheckpointParts((), "")
    calls: dict[int, HostCall[Any]] = dataclasses.field(default_factory=dict)
    following: asyncio.Task[None] | None = None
    launched: Launched | None = None
    is_spared: bool = False

    @property
    def is_registered(self) -> bool:
        return self.state in (MemberState.UNABLE, MemberState.ABLE)

    def ask(self, call: HostCall[Any], data: bytes) -> bool:
        """Send an encoded request, but do not wait until the host has read it; return whether it is connected."""
        if self.channel is None:
            return False
        self.calls[call.number] = call
        self.channel.write(data)
        return True

    def answer(self, message: messages.Message) -> None:
        """Pass on the answer of the host to the call that waits for it, if one still does."""
        number = message.get("id")
        if isinstance(number, int) and (call := self.calls.pop(number, None)):
            call.receive(self.host.replica, message)

    def cancel(self, call: HostCall[Any]) -> None:
        """Tell the host that nobody waits for its answer any more, unless it has answered."""
        if self.calls.pop(call.number, None) and self.channel is not None:
            self.channel.write(messages.encode({"type": "cancel", "id": call.number}))

    def lose(self) -> None:
        """Have no call wait for this host, whose connection has ended."""
        self.channel = None
        for call in self.calls.values():
            call.put(self.host.replica, HostError(f"the connection of host {self.host.replica} has ended"))
        self.calls.clear()

    def send_result(self, result: JobResult, dismissed: bool = False) -> None:
        """Send its last message, with the result of the job, or one with which it alone is dismissed; do not wait."""
        self.knows_result = not dismissed
        if self.channel is not None:
            self.channel.finish()
            self.channel.write(messages.encode({"type": "result", "dismissed": dismissed, **vars(result)}))


@dataclasses.dataclass(eq=False)
class Attempt:
    """One attempt of a run, or the only one of the commands of a role.

    Attributes:
        hosts: by replica, in the order of their node ranks; those of the attempt before until it is formed.
        number: counts all attempts of the run, from 0.
        restart_count: TORCHELASTIC_RESTART_COUNT; as under torchrun, a host that joins adds none.
        restarts_used: how many of torchrun's ``--max-restarts`` have been used.
        world: its ranks, or commands; None before these may have started.
        exits: how they have ended, by rank.
        failed_before: the ranks that had never joined a process group when the attempt before failed.
    """

    hosts: dict[int, Member] = dataclasses.field(default_factory=dict)
    number: int = 0
    restart_count: int = 0
    restarts_used: int = 0
    world: World | None = None
    exits: dict[int, RankExit] = dataclasses.field(default_factory=dict)
    failed_before: frozenset[int] = frozenset()
    _is_recorded: bool = False

    def next(self, *, is_restart: bool = True, is_charged: bool = False) -> Attempt:
        """Return the attempt after this one, for which one of torchrun's restarts may have been used."""
        used, failed = self.restarts_used + is_charged, self.never_joined
        return Attempt(self.hosts, self.number + 1, self.restart_count + is_restart, used, failed_before=failed)

    def begin(self, world: World) -> None:
        self.world, self.exits = world, {}

    def report_start(self, reporter: Reporter, what: Literal["ranks", "commands"]) -> None:
        """Report what its hosts have started."""
        assert self.world is not None
        world, launched = self.world, [(member.host, member.launched) for member in self.hosts.values()]
        shown = [
            HostStart(
                host.replica, host.node, world.place(host.replica).first_rank, tuple(answer.pids), answer.imported
            )
            for host, answer in launched
            if answer is not None
        ]
        unshared = next((answer.unshared for _, answer in launched if answer and answer.unshared), "")
        more = {"count": world.size, "unshared": unshared} if what == "ranks" else {}
        text = f"{what} {world.size}/{world.size}"
        reporter.ranks_started(text, shown, attempt=world.attempt, log_attempt=world.log_attempt, **more)

    def add(self, exits: Exits) -> None:
        self.exits.update({rank_exit.rank: rank_exit for rank_exit in exits})

    @property
    def cause(self) -> RankExit | None:
        return root_cause(self.exits.values())

    @property
    def size(self) -> int:
        """The number of its ranks or commands."""
        return 0 if self.world is None else self.world.size

    @property
    def never_joined(self) -> frozenset[int]:
        """The ranks that failed while forming their first process group."""
        return frozenset(ended.rank for ended in self.exits.values() if ended.failed and ended.joined is False)

    def failure(self, cause: RankExit) -> JobResult:
        """Return the result of the job if this failure ends it."""
        return JobResult(shell_code(cause.code), describe_failure(self.exits.values(), cause, self.size), cause)

    def record_end(self, reporter: Reporter) -> None:
        """Report how its ranks have ended as an event, once; nothing if they have not started."""
        if self.exits and self.world is not None and not self._is_recorded:
            self._is_recorded = True
            text = f"attempt {self.number + 1} has ended"
            steps = steps_of_all(self.exits.values())
            fields = {} if steps is None else {"steps": dataclasses.asdict(steps)}
            cause = self.cause
            ends = [
                RankEnd(
                    rank,
                    ended.code,
                    ended.started,
                    ended.time,
                    secondary=ended.code != 0 and ended is not cause and (not ended.failed or ended.is_collateral),
                    grouped=ended.grouped,
                )
                for rank, ended in sorted(self.exits.items())
            ]
            reporter.ranks_ended(text, ends, attempt=self.number, **fields)


class Members:
    """The last host of each replica, and the present attempt.

    A job has up to thousands of hosts, and each registers: what an event changes is counted, and never searched for.

    Attributes:
        counts: the number of hosts in each state.
        connected: the hosts, but for replica 0's own, whose channel has not ended, by replica.
        attempt: the present attempt, or the next one; it has no hosts before the first is formed.
        formation: how often its hosts have changed.
        has_begun: whether all hosts that the first attempt needs have been in it.
        on_idle_change: called when the hosts have changed that can take part, and do not.
        on_checkpoints: called when a host of the attempt has other parts of checkpoints.
    """

    def __init__(self, replicas: int) -> None:
        self.attempt = Attempt()
        self.formation = 0
        self.has_begun = False
        self.on_idle_change: Callable[[], None] = lambda: None
        self.on_checkpoints: Callable[[], None] = lambda: None
        self._replicas = replicas
        self._members: dict[int, Member] = {}
        self.connected: dict[int, Member] = {}
        self._idle: dict[int, Registration] = {}
        self.counts = Counter[MemberState]()
        self._machines = Counter[str]()
        self._changes = Changes()
        self.until, self.notify = self._changes.until, self._changes.notify

    def add(self, member: Member) -> None:
        """Enter a host in the place of the last one of its replica."""
        if last := self.get(member.host.replica):
            self.set_state(last, MemberState.LOST)
        self._members[member.host.replica] = member
        if member.channel is not None:
            self.connected[member.host.replica] = member
        self._count(member, 1)

    def set_state(self, member: Member, state: MemberState) -> None:
        self._count(member, -1)
        member.state = state
        self._count(member, 1)
        if state is MemberState.LOST:
            self.connected.pop(member.host.replica, None)
            member.lose()

    def _count(self, member: Member, step: int) -> None:
        host = member.host
        self.counts[member.state] += step
        if member.is_registered:
            self._machines[host.node] += step
        if member.state is MemberState.ABLE and self.attempt.hosts.get(host.replica) is not member:
            self._idle[host.replica] = host
            if step < 0:
                del self._idle[host.replica]
            self.on_idle_change()
        self.notify()

    def form(self, hosts: Sequence[Registration]) -> None:
        """Begin an attempt with these hosts, in the order of their node ranks."""
        self.attempt.hosts, self._idle = {}, {host.replica: host for host in self.able}
        self.has_begun = True
        self.extend(hosts)

    def extend(self, hosts: Sequence[Registration]) -> None:
        """Have more hosts take part in the attempt."""
        for host in hosts:
            self.attempt.hosts[host.replica] = self._members[host.replica]
            self._idle.pop(host.replica, None)
        self.formation += 1
        self.notify()

    # -- one host ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def get(self, replica: int) -> Member | None:
        """Return the last host of a replica; None if none has come."""
        return self._members.get(replica)

    def registered(self, replica: int) -> Registration | None:
        member = self.get(replica)
        return member.host if member is not None and member.is_registered else None

    def in_attempt(self, replica: int) -> Member | None:
        """Return the replica's host in the attempt; None if it has been lost or dismissed, and perhaps replaced."""
        member = self.attempt.hosts.get(replica)
        return member if member is not None and member.is_registered else None

    def set_checkpoints(self, replica: int, parts: CheckpointParts) -> None:
        if member := self.in_attempt(replica):
            member.checkpoints = parts
            self.on_checkpoints()

    def machine(self, host: Registration) -> str:
        """Return the name under which failures of a host count: the machine's, unless other hosts share it."""
        name, registered = host.node, self.registered(host.replica)
        others = self._machines[name] - (registered is not None and registered.node == name)
        return f"{name} (replica {host.replica})" if others else name

    # -- all hosts -----------------------------------------------------------------------------------------------------

    @property
    def able(self) -> list[Registration]:
        """The registered hosts that can take part, by replica."""
        return [member.host for _, member in sorted(self._members.items()) if member.state is MemberState.ABLE]

    @property
    def hosts(self) -> list[Registration]:
        """The hosts of the present attempt, in the order of their node ranks."""
        return [member.host for member in self.attempt.hosts.values()]

    @property
    def present(self) -> list[Member]:
        """Those of them that have not left."""
        return [member for member in self.attempt.hosts.values() if member.is_registered]

    @property
    def idle(self) -> list[Registration]:
        """The hosts that can take part, and do not, by replica."""
        return [host for _, host in sorted(self._idle.items())]

    @property
    def able_count(self) -> int:
        return self.counts[MemberState.ABLE]

    @property
    def registered_count(self) -> int:
        return self.counts[MemberState.ABLE] + self.counts[MemberState.UNABLE]

    @property
    def are_together(self) -> bool:
        """Whether an attempt has been formed, and no host has left it."""
        return bool(self.attempt.hosts) and self.able_count - len(self._idle) == len(self.attempt.hosts)

    @property
    def is_complete(self) -> bool:
        """Whether all replicas are registered."""
        return self.registered_count == self._replicas

    @property
    def missing(self) -> list[int]:
        """The replicas that are not registered."""
        return [replica for replica in range(self._replicas) if not self.registered(replica)]

    @property
    def unseen(self) -> int:
        """The number of replicas that have never come, and may still do so."""
        return self._replicas - len(self._members)
