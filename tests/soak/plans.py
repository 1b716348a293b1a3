# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What each job of a soak is and what is done to it, all of it from the seed and the job's number."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from pathlib import Path

from torchx.specs import AppDef, RetryPolicy, Role

ROLE = "r"

#: Works for some time, with children of two kinds, and leaves a proof of each step: FOLDER SECONDS CHILDREN TORCH.
PROGRAM = """
import json, os, signal, subprocess, sys, time
folder, seconds, children, torch = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
rank, attempt, port = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["MASTER_PORT"]
def prove(kind):
    path = f"{folder}/{kind}-{rank}-{os.getpid()}"
    with open(path + ".tmp", "w") as file:
        json.dump({"kind": kind, "rank": int(rank), "attempt": f"{attempt}/{port}", "pid": os.getpid()}, file)
    os.rename(path + ".tmp", path)
prove("begin")
print("begin", rank, flush=True)
if children:
    subprocess.Popen(["sleep", "1000"])
    subprocess.Popen(["sleep", "1001"], start_new_session=True,
                     preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))
if torch:
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
for _ in range(round(10 * seconds)):
    print("working", rank, flush=True)
    time.sleep(0.1)
    if torch:
        dist.all_reduce(torch.ones(1))
if torch:
    time.sleep(0.5)  # a peer may still be reading what we have sent
print("end", rank, flush=True)
prove("end")
if torch:
    os._exit(0)  # torch aborts an interpreter at its end now and then
"""

#: Deadly or harmless, and how often each is drawn.
_FAULTS = {
    ("none", ""): 1,
    ("cancel", ""): 3,
    ("log", ""): 1,
    ("folder", ""): 2,
    ("kill", "keeper"): 1,
    ("kill", "supervisor"): 2,
    ("kill", "host"): 5,
    ("kill", "agent"): 4,
    ("kill", "rank"): 4,
    ("kill", "child"): 1,
    ("term", "keeper"): 1,
    ("term", "supervisor"): 2,
    ("term", "host"): 4,
    ("term", "agent"): 2,
    ("term", "rank"): 2,
    ("stop", "keeper"): 1,
    ("stop", "supervisor"): 2,
    ("stop", "host"): 3,
    ("stop", "agent"): 3,
    ("stop", "rank"): 2,
}

#: Seconds from the submission of a small job to its ranks on an idle machine, about.
_START = 0.7


@dataclass(frozen=True)
class Blow:
    """One fault.

    Attributes:
        fault: none, cancel, log (delete a rank's log), folder (delete the app's folder), kill, term, stop (SIGSTOP, and
            SIGCONT after ``pause`` seconds).
        target: the kind of process that is signalled: keeper, supervisor, host, agent, rank, child.
        moment: seconds from the submission to the fault; a process that is not there yet is waited for.
        which: picks one of several targets, 0 to 1.
    """

    fault: str
    target: str
    moment: float
    which: float
    pause: float

    @property
    def what(self) -> str:
        """In two words."""
        return f"{self.fault} {self.target}".strip()

    @property
    def tells(self) -> bool:
        """Whether it tells the app to end."""
        return self.what in ("cancel", "term supervisor")

    @property
    def harmless(self) -> bool:
        """Whether a job succeeds all the same."""
        return self.fault in ("none", "log", "stop") or self.target in ("keeper", "child")


@dataclass(frozen=True)
class Plan:
    """One job and its faults, one or two.

    Attributes:
        restarts: torchrun's --max-restarts.
        seconds: that the ranks work.
        children: whether each rank has a child and a grandchild that has left its session and ignores SIGTERM.
        follow: whether somebody follows the log.
    """

    number: int
    hosts: int
    ranks: int
    restarts: int
    policy: str
    retries: int
    seconds: float
    children: bool
    torch: bool
    follow: bool
    blows: tuple[Blow, ...]

    @property
    def world(self) -> int:
        return self.hosts * self.ranks

    @property
    def what(self) -> str:
        """The faults, in two words each."""
        return " + ".join(blow.what for blow in self.blows)

    @property
    def is_removed(self) -> bool:
        """Whether its folder is removed."""
        return self.blows[0].fault == "folder"

    @property
    def shape(self) -> str:
        """The job in a few."""
        more = f" restarts={self.restarts}" if self.restarts else ""
        more += f" {self.policy.lower()}={self.retries}" if self.retries else ""
        return (
            f"{self.hosts}x{self.ranks} {self.seconds:.1f}s{more}{' children' * self.children}{' torch' * self.torch}"
        )

    def app(self, folder: Path) -> AppDef:
        """What to submit; the program leaves its proofs in ``folder``."""
        program = folder / "prog.py"
        program.write_text(PROGRAM)
        options = ["--nnodes", str(self.hosts), "--nproc-per-node", str(self.ranks), "--tee", "3"]
        args = [str(folder), str(self.seconds), str(int(self.children)), str(int(self.torch))]
        role = Role(
            ROLE,
            image="",
            entrypoint="torchrun",
            args=[*options, "--max-restarts", str(self.restarts), str(program), *args],
            num_replicas=self.hosts,
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
    torch = dice.random() < 0.1
    seconds = round(dice.uniform(0.2, 1.5), 2)
    first = _blow(dice, dice.uniform(0.0, _START + seconds + (4 if torch else 0.2)))
    blows: tuple[Blow, ...] = (first,)
    if first.fault not in ("none", "folder") and dice.random() < 0.3:
        blows = (first, _blow(dice, first.moment + dice.uniform(0.0, 2.5), but=("none", "folder")))
    return Plan(
        number=number,
        hosts=dice.choice((1, 2, 2, 3)),
        ranks=dice.choice((1, 2)),
        restarts=dice.choice((0, 0, 1, 2)),
        policy=dice.choice(("APPLICATION", "REPLICA", "ROLE")),
        retries=dice.choice((0, 0, 1, 2)),
        # One whose folder is removed has to be stopped: nobody could see it end.
        seconds=1000.0 if first.fault == "folder" else seconds,
        children=any(blow.target == "child" for blow in blows) or dice.random() < 0.3,
        torch=torch,
        follow=dice.random() < 0.3,
        blows=blows,
    )


def _blow(dice: random.Random, moment: float, but: tuple[str, ...] = ()) -> Blow:
    faults = {what: often for what, often in _FAULTS.items() if what[0] not in but}
    [(fault, target)] = dice.choices(list(faults), list(faults.values()))
    return Blow(fault, target, round(moment, 3), dice.random(), round(dice.uniform(0.2, 2.5), 2))
