# SPDX-License-Identifier: BSD-3-Clause
"""What each job of a soak is and which faults are injected into it, all of it from the seed and the job's number."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

from torchx.specs import AppDef, RetryPolicy, Role

from tests.soak import program

ROLE = "r"

#: What a fault of most jobs does, and to which processes.
SIGNALS = ("kill", "term", "stop", "freeze")
TARGETS = ("submitter", "supervisor", "host", "rank")
#: What is injected less often.
_OTHERS = (("cancel", ""), ("kill", "zygote"), ("term", "zygote"), ("stop", "zygote"))
_RARE = (("none", "", "run"), ("folder", "", "start"), ("folder", "", "run"))
_RAREST = ("kill", "child", "run")

#: The parts of a job's life, and the kinds of events that begin each. A moment waits for one group of kinds, of which
#: any one will do. ``rank_ended`` is the proof that a rank leaves at its end.
PHASES: dict[str, tuple[tuple[str, ...], ...]] = {
    "start": ((), ("submitted",), ("supervised",), ("replica_started",), ("hosts",)),
    "run": (("ranks",), ("output",)),
    "restart": (("restart", "rank_restart", "replacement", "resize"),),
    "end": (("rank_ended",), ("result",), ("replica_exited",)),
}

#: For each kind of process that may be gone at the end: the events at which it surely still exists.
_ENDS = {"host": ("rank_ended", "result"), **dict.fromkeys(("rank", "zygote"), ("rank_ended",))}

#: Seconds after the event, at most: a phase's own length, about.
_DELAYS = {"start": 0.3, "run": 1.0, "restart": 0.8, "end": 0.1}

#: Seconds that a ``torchx run`` takes to submit, about: when its own life is the phase.
_SUBMISSION = 2.0

#: Seconds that the ranks work in a job that a fault has to end.
_UNTIL_TOLD = 1000.0

#: How a job survives the loss of a host: not at all or by a spare one, by a new one (REPLICA), or with fewer.
KINDS = ("fixed", "replaced", "elastic")


class Cell(NamedTuple):
    """What is certain of one job; the rest of its plan is drawn.

    Attributes:
        kind: one of KINDS; empty for any.
        faults: action, target and phase of each.
    """

    kind: str
    faults: tuple[tuple[str, str, str], ...]


def _cells() -> list[Cell]:
    """Return what the jobs of a whole soak contain once each.

    That is every signal to every process in every phase of each kind of job, every signal to every process together
    with each other process, twice, and each other fault twice.
    """
    phases = tuple(PHASES)
    cells = [
        Cell(kind, ((action, target, phase),))
        for kind, action, target, phase in product(KINDS, SIGNALS, TARGETS, phases)
    ]
    pairs = [(first, then) for first, then in product(TARGETS, TARGETS) if TARGETS.index(first) <= TARGETS.index(then)]
    for number, ((first, then), action) in enumerate(product(pairs, SIGNALS)):
        for turn, phase in enumerate(("with", phases[number // 4 % 4])):
            before = SIGNALS[(number + number // 4 + 2 * turn) % 4]
            began = phases[(number // 4 + number) % 3]
            cells.append(Cell(KINDS[(number + turn) % 3], ((before, first, began), (action, then, phase))))
    others = [(*what, phase) for what, phase in product(_OTHERS, phases)]
    cells += 2 * [Cell("", (fault,)) for fault in (*others, *_RARE, _RAREST)]
    return cells


@lru_cache
def cells(seed: int) -> list[Cell]:
    """Return the cells in an order of the seed's own, so that the first jobs are of all sorts."""
    found = _cells()
    random.Random(seed).shuffle(found)
    return found


@dataclass(frozen=True)
class Moment:
    """When a fault is injected.

    Attributes:
        phase: a key of PHASES, or ``with`` for that of the fault before it.
        events: kinds of events of which one must have happened; empty for none.
        delay: seconds from then on.
    """

    phase: str
    events: tuple[str, ...]
    delay: float


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        action: none, cancel, folder (delete the app's folder), kill (SIGKILL), term (SIGTERM), stop (SIGSTOP, and
            SIGCONT after ``pause`` seconds), freeze (SIGSTOP alone).
        target: the kind of process that is signalled: submitter, supervisor, host, zygote, rank, child;
            empty for actions that are no signal.
        which: picks one of several targets, 0 to 1.
        pause: seconds.
    """

    action: str
    target: str
    moment: Moment
    which: float
    pause: float

    @property
    def what(self) -> str:
        """In two words."""
        return f"{self.action} {self.target}".strip()

    @property
    def deletes(self) -> bool:
        """Whether it deletes the app's folder."""
        return self.action == "folder"

    @property
    def tells(self) -> bool:
        """Whether it tells the app to end."""
        return self.what in ("cancel", "term supervisor", "term submitter")

    @property
    def hangs(self) -> bool:
        """Whether a job may hang while the process lives: a frozen rank, or only host, may be a busy one."""
        return self.action == "freeze" and self.target in ("supervisor", "host", "rank")

    @property
    def harmless(self) -> bool:
        """Whether a job succeeds all the same, unless it hangs."""
        harmless_target = self.target in ("child", "submitter", "zygote")
        return self.action in ("none", "stop") or (harmless_target and not self.tells)


@dataclass(frozen=True)
class Plan:
    """One job and its faults, one or two.

    Attributes:
        hosts: without spare ones.
        fewest: torchrun's MIN of ``--nnodes MIN:MAX``; ``hosts`` for a job of fixed size.
        spares: spare hosts.
        restarts: torchrun's --max-restarts.
        seconds: that the ranks work.
        children: whether each rank has a child and a grandchild that has left its session and ignores SIGTERM.
        fresh: whether each rank is an interpreter of its own, not a fork of a zygote.
        fails: whether rank 0 fails once by itself.
        follow: whether somebody follows the log.
    """

    number: int
    hosts: int
    fewest: int
    spares: int
    ranks: int
    restarts: int
    policy: str
    retries: int
    seconds: float
    children: bool
    fresh: bool
    fails: bool
    follow: bool
    faults: tuple[Fault, ...]

    @property
    def elastic(self) -> bool:
        """Whether it runs on fewer hosts than it has."""
        return self.fewest < self.hosts

    @property
    def replicas(self) -> int:
        """How many hosts are started."""
        return self.hosts + self.spares

    @property
    def awaits_end(self) -> bool:
        """Whether its ranks work until a fault ends it."""
        return self.seconds == _UNTIL_TOLD

    @property
    def what(self) -> str:
        """The faults, in two words each."""
        return " + ".join(fault.what for fault in self.faults)

    @property
    def by_command(self) -> bool:
        """Whether a process of its own submits it: a ``torchx run --wait``."""
        return any(fault.target == "submitter" for fault in self.faults)

    @property
    def shape(self) -> str:
        """The job in a few words."""
        words = [f"{self.fewest}:{self.hosts}x{self.ranks}" if self.elastic else f"{self.hosts}x{self.ranks}"]
        words[0] += f"+{self.spares}" * bool(self.spares)
        words.append(f"{self.seconds:.1f}s")
        words += [f"restarts={self.restarts}"] * bool(self.restarts)
        words += [f"{self.policy.lower()}={self.retries}"] * bool(self.retries)
        words += [name for name in ("fails", "children", "fresh", "follow") if getattr(self, name)]
        return " ".join(words)

    def app(self, folder: Path) -> AppDef:
        """What to submit; the program leaves its proofs in ``folder``."""
        nnodes = f"{self.fewest}:{self.hosts}" if self.elastic else str(self.hosts)
        options = ["--nnodes", nnodes, "--nproc-per-node", str(self.ranks), "--tee", "3"]
        if self.elastic:
            options += ["--rdzv-conf", "last_call_timeout=2"]
        switches = [str(int(switch)) for switch in (self.children, self.fails)]
        args = [program.__file__, str(folder), str(self.seconds), *switches]
        role = Role(
            ROLE,
            image="",
            entrypoint="torchrun",
            args=[*options, "--max-restarts", str(self.restarts), *args],
            num_replicas=self.hosts,
            min_replicas=self.fewest if self.elastic else None,
            max_retries=self.retries,
            retry_policy=RetryPolicy(self.policy),
        )
        return AppDef(f"soak{self.number}", [role])


def draw(seed: int, number: int) -> Plan:
    """The plan of one job."""
    dice = random.Random(f"{seed}/{number}")
    cell = cells(seed)[number % len(cells(seed))]
    seconds = round(dice.uniform(0.2, 1.5), 2)
    faults = tuple(_fault(dice, *what, seconds) for what in cell.faults)
    kind = cell.kind or dice.choice(KINDS)
    hosts = dice.choice((1, 2, 2, 2, 3))
    if kind == "elastic":
        hosts = max(2, hosts)
    restarts, retries = dice.choice((0, 0, 1, 2)), dice.choice((0, 0, 1, 2))
    policy = dice.choice(("APPLICATION", "REPLICA", "ROLE"))
    if kind == "replaced":
        policy, retries = "REPLICA", max(1, retries)
    fails = False
    # There must be something to restart after: a fault, or the program's own failure.
    if any(fault.moment.phase == "restart" for fault in faults):
        first = faults[0]
        fails = first.moment.phase == "restart" or first.action not in ("kill", "term")
        fails = fails or first.target not in ("host", "rank")
        restarts, retries = max(1, restarts), retries if fails else max(1, retries)
    return Plan(
        number=number,
        hosts=hosts,
        fewest=dice.randrange(1, hosts) if kind == "elastic" else hosts,
        spares=int(kind == "fixed" and dice.random() < 0.2),
        ranks=dice.choice((1, 2)),
        restarts=restarts,
        policy=policy,
        retries=retries,
        # What a fault should end must not end by itself before.
        seconds=_UNTIL_TOLD if _ends_it(faults, fails) else seconds,
        children=any(fault.target == "child" for fault in faults) or dice.random() < 0.3,
        fresh=dice.random() < 0.1 and not any(fault.target == "zygote" for fault in faults),
        fails=fails and not any(fault.deletes for fault in faults),
        follow=dice.random() < 0.4,
        faults=faults,
    )


def _ends_it(faults: tuple[Fault, ...], fails: bool) -> bool:
    """Whether one of these faults ends the job before its ranks could have ended."""
    phases = ("start", "run", "with", *["restart"] * fails)
    return any((fault.tells or fault.deletes) and fault.moment.phase in phases for fault in faults) and not any(
        fault.moment.phase == "end" for fault in faults
    )


def _fault(dice: random.Random, action: str, target: str, phase: str, seconds: float) -> Fault:
    events = dice.choice(PHASES[phase]) if phase != "with" else ()
    if phase == "end" and target in _ENDS:
        events = (dice.choice(_ENDS[target]),)
    longest = _DELAYS.get(phase, 0.05)
    if target == "submitter" and phase == "start" and not events:
        longest = _SUBMISSION
    elif phase in ("run", "restart"):
        longest = min(longest, 0.6 * seconds)  # later, the ranks are about to end
    moment = Moment(phase, events, round(dice.uniform(0.0, longest), 3))
    return Fault(action, target, moment, dice.random(), round(dice.uniform(0.2, 2.5), 2))
