# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What each job of a soak is and which faults are injected into it, all of it from the seed and the job's number."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from pathlib import Path

from torchx.specs import AppDef, RetryPolicy, Role

from tests.soak import program

ROLE = "r"

#: Actions and targets, and how often each pair is drawn.
_FAULTS = {
    ("none", ""): 1,
    ("cancel", ""): 3,
    ("log", ""): 1,
    ("folder", ""): 2,
    ("kill", "keeper"): 2,
    ("kill", "supervisor"): 2,
    ("kill", "host"): 5,
    ("kill", "agent"): 4,
    ("kill", "rank"): 4,
    ("kill", "zygote"): 3,
    ("kill", "child"): 1,
    ("kill", "submitter"): 2,
    ("term", "keeper"): 1,
    ("term", "supervisor"): 2,
    ("term", "host"): 4,
    ("term", "agent"): 2,
    ("term", "rank"): 2,
    ("term", "zygote"): 1,
    ("term", "submitter"): 2,
    ("stop", "keeper"): 1,
    ("stop", "supervisor"): 2,
    ("stop", "host"): 3,
    ("stop", "agent"): 3,
    ("stop", "rank"): 2,
    ("stop", "zygote"): 2,
    ("stop", "submitter"): 1,
    ("freeze", "keeper"): 1,
    ("freeze", "supervisor"): 1,
    ("freeze", "host"): 3,
    ("freeze", "agent"): 2,
    ("freeze", "rank"): 1,
    ("freeze", "submitter"): 1,
}

#: What is always the only fault of its job: nothing is seen of a job whose folder is gone.
_ALONE = ("none", "folder")

#: The parts of a job's life, and the kinds of events that begin each. A moment waits for one group of kinds, of which
#: any one will do. ``rank_ended`` is the proof that a rank leaves at its end.
PHASES: dict[str, tuple[tuple[str, ...], ...]] = {
    "start": ((), ("submitted",), ("supervised",), ("replica_started",), ("hosts",), ("mesh",)),
    "run": (("ranks",), ("output",)),
    "restart": (("restart", "rank_restart", "replacement", "resize"),),
    "end": (("rank_ended",), ("result",), ("replica_exited",)),
}

#: Seconds after the event, at most: a phase's own length, about.
_DELAYS = {"start": 0.3, "run": 1.0, "restart": 0.8, "end": 0.1}

#: Seconds that a ``torchx run`` takes to submit, about: when its own life is the phase.
_SUBMISSION = 2.0


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
        action: none, cancel, log (delete a rank's log), folder (delete the app's folder), kill (SIGKILL), term
            (SIGTERM), stop (SIGSTOP, and SIGCONT after ``pause`` seconds), freeze (SIGSTOP alone).
        target: the kind of process that is signalled: submitter, keeper, supervisor, host, agent, zygote, rank, child;
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
    def tells(self) -> bool:
        """Whether it tells the app to end."""
        return self.what in ("cancel", "term supervisor", "term submitter")

    @property
    def hangs(self) -> bool:
        """Whether a job may hang from then on without an end: nobody can tell a frozen rank from a busy one."""
        return self.action == "freeze" and self.target in ("supervisor", "rank")

    @property
    def harmless(self) -> bool:
        """Whether a job succeeds all the same, unless it hangs."""
        harmless_target = self.target in ("keeper", "child", "submitter", "zygote")
        return self.action in ("none", "log", "stop") or (harmless_target and not self.tells)


@dataclass(frozen=True)
class Plan:
    """One job and its faults, one or two.

    Attributes:
        fewest: torchrun's MIN of ``--nnodes MIN:MAX``; ``hosts`` for a job of fixed size.
        restarts: torchrun's --max-restarts.
        seconds: that the ranks work.
        children: whether each rank has a child and a grandchild that has left its session and ignores SIGTERM.
        fails: whether rank 0 fails once by itself.
        follow: whether somebody follows the log.
    """

    number: int
    hosts: int
    fewest: int
    ranks: int
    restarts: int
    policy: str
    retries: int
    seconds: float
    children: bool
    torch: bool
    fails: bool
    follow: bool
    faults: tuple[Fault, ...]

    @property
    def elastic(self) -> bool:
        """Whether it runs on fewer hosts than it has."""
        return self.fewest < self.hosts

    @property
    def what(self) -> str:
        """The faults, in two words each."""
        return " + ".join(fault.what for fault in self.faults)

    @property
    def is_removed(self) -> bool:
        """Whether its folder is removed."""
        return self.faults[0].action == "folder"

    @property
    def by_command(self) -> bool:
        """Whether a process of its own submits it: a ``torchx run --wait``."""
        return any(fault.target == "submitter" for fault in self.faults)

    @property
    def shape(self) -> str:
        """The job in a few words."""
        words = [f"{self.fewest}:{self.hosts}x{self.ranks}" if self.elastic else f"{self.hosts}x{self.ranks}"]
        words.append(f"{self.seconds:.1f}s")
        words += [f"restarts={self.restarts}"] * bool(self.restarts)
        words += [f"{self.policy.lower()}={self.retries}"] * bool(self.retries)
        words += [name for name in ("fails", "children", "torch", "follow") if getattr(self, name)]
        return " ".join(words)

    def app(self, folder: Path) -> AppDef:
        """What to submit; the program leaves its proofs in ``folder``."""
        nnodes = f"{self.fewest}:{self.hosts}" if self.elastic else str(self.hosts)
        options = ["--nnodes", nnodes, "--nproc-per-node", str(self.ranks), "--tee", "3"]
        if self.elastic:
            options += ["--rdzv-conf", "last_call_timeout=2"]
        switches = [str(int(switch)) for switch in (self.children, self.torch, self.fails)]
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

    def repeat(self, seed: int) -> str:
        """How to do just this again."""
        return f"python -m tests.soak --seed {seed} --only {self.number}"

    def __str__(self) -> str:
        return str(asdict(self))


def draw(seed: int, number: int) -> Plan:
    """The plan of one job."""
    dice = random.Random(f"{seed}/{number}")
    first = _fault(dice, dice.choice(tuple(PHASES)))
    faults: tuple[Fault, ...] = (first,)
    if first.action not in _ALONE and dice.random() < 0.35:
        faults = (first, _fault(dice, dice.choice(("with", "with", *PHASES)), _ALONE))
    hosts = dice.choice((1, 2, 2, 2, 3))
    if any(fault.target == "agent" for fault in faults):
        hosts = max(2, hosts)  # replica 0's host has none
    restarts, retries = dice.choice((0, 0, 1, 2)), dice.choice((0, 0, 1, 2))
    fails = False
    # There must be something to restart after: a fault, or the program's own failure.
    if any(fault.moment.phase == "restart" for fault in faults):
        fails = not (faults[0].moment.phase != "restart" and faults[0].target in ("host", "agent", "rank"))
        restarts, retries = max(1, restarts), retries if fails else max(1, retries)
    return Plan(
        number=number,
        hosts=hosts,
        fewest=dice.randrange(1, hosts) if hosts > 1 and dice.random() < 0.3 else hosts,
        ranks=dice.choice((1, 2)),
        restarts=restarts,
        policy=dice.choice(("APPLICATION", "REPLICA", "REPLICA", "ROLE")),
        retries=retries,
        # One whose folder is removed has to be stopped: nobody could see it end.
        seconds=1000.0 if first.action == "folder" else round(dice.uniform(0.2, 1.5), 2),
        children=any(fault.target == "child" for fault in faults) or dice.random() < 0.3,
        torch=dice.random() < 0.08,
        fails=fails and first.action != "folder",
        follow=dice.random() < 0.4,
        faults=faults,
    )


def _fault(dice: random.Random, phase: str, but: tuple[str, ...] = ()) -> Fault:
    weights = {what: often for what, often in _FAULTS.items() if what[0] not in but}
    [(action, target)] = dice.choices(list(weights), list(weights.values()))
    if action == "folder" and phase in ("restart", "end"):
        phase = "run"
    events = dice.choice(PHASES[phase]) if phase != "with" else ()
    longest = _SUBMISSION if target == "submitter" and phase == "start" and not events else _DELAYS.get(phase, 0.05)
    moment = Moment(phase, events, round(dice.uniform(0.0, longest), 3))
    return Fault(action, target, moment, dice.random(), round(dice.uniform(0.2, 2.5), 2))
