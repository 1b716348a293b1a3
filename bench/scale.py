# SPDX-License-Identifier: BSD-3-Clause
"""What grows with the ranks of a job: ``python bench/scale.py [--ranks N ...] [--per-host K] [--rounds N]``.

Replica 0 and the clients get what simulated hosts would tell them: samples, stacks, collectives and events of so many
ranks. A process of its own reads the answers of all hosts from a pipe, as replica 0 and then the client do, so its
memory is theirs. The table has the medians over the rounds, in milliseconds of one core unless a name says otherwise,
and how much more the largest job takes than the smallest, divided by how many more ranks it has: 1 is linear.
``bench/rendezvous.py`` measures connections.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from torchx.runner import get_runner

from torchx_monarch.backends.core.snapshot import AppSnapshot
from torchx_monarch.cli import status as cli_status
from torchx_monarch.cli import top
from torchx_monarch.cli.jobs import JobFacts
from torchx_monarch.cli.report import page_of
from torchx_monarch.client.rank_queries import read_stacks
from torchx_monarch.components import spmd
from torchx_monarch.controller.host_messages import ReadCollectives, Request, SampleRanks, TakeStacks
from torchx_monarch.insight import hangs, rank_sample, stacks, timeline
from torchx_monarch.insight.group_calls import Collective, GroupStatus, group_calls
from torchx_monarch.insight.hangs import HostCollectives, RankCollectives
from torchx_monarch.insight.rank_sample import RankSample, RankSamples, read_samples
from torchx_monarch.insight.stacks import Frame, ProcessStacks, ThreadStack, shared_stacks
from torchx_monarch.model.codec import decode
from torchx_monarch.model.role_spec import RoleSpec, WorkloadKind
from torchx_monarch.schedulers.job_status import JobStatus
from torchx_monarch.transport import messages

NOW = 1_700_000_000.0

T = TypeVar("T")

ROLE = [RoleSpec("trainer", workload=WorkloadKind.RANKS)]


class Job:
    """A job of simulated ranks, of which the last one has not called the collective in which the others wait.

    Args:
        ranks: number of ranks.
        per_host: number of ranks of each host.
    """

    def __init__(self, ranks: int, per_host: int) -> None:
        self.ranks, self.per_host = ranks, per_host

    def answers(self, request: str) -> Iterator[bytes]:
        """Yield the message with which each host answers a request."""
        for host in range(self.ranks // self.per_host):
            ranks = range(host * self.per_host, (host + 1) * self.per_host)
            yield messages.encode({"answer": getattr(self, request)(ranks)})

    def collectives(self, ranks: range) -> HostCollectives:
        read = [RankCollectives(rank, NOW, self._groups(rank, NOW)) for rank in ranks]
        return HostCollectives.from_ranks(read, details=True)

    def samples(self, ranks: range) -> str:
        return self._samples(ranks, NOW)

    def samples_before(self, ranks: range) -> str:
        return self._samples(ranks, NOW - 2)

    def stacks(self, ranks: range) -> list[stacks.SharedStacks]:
        return shared_stacks(map(self._stacks, ranks))

    def _groups(self, rank: int, now: float) -> tuple[GroupStatus, ...]:
        times = tuple(now - 20 + number + rank % 97 / 1e4 for number in range(16))
        called = tuple(Collective(number, "nccl:all_reduce", ((1024,),), at) for number, at in enumerate(times))
        waits = rank != self.ranks - 1
        first = rank - rank % self.per_host

        def group(name: str, members: str, enqueued: int, waiting: Collective | None = None) -> GroupStatus:
            done = enqueued - 1 if waiting else enqueued
            return GroupStatus(
                name, members, enqueued, done, waiting, called[: enqueued + 1], calls=times[: enqueued + 1]
            )

        return (
            group("0", f"0-{self.ranks - 1}", 15 if waits else 14, called[-1] if waits else None),
            group("1", f"{first}-{first + self.per_host - 1}", 7),
            group("2", f"{rank % self.per_host}-{self.ranks - 1}:{self.per_host}", 9),
        )

    def _samples(self, ranks: range, now: float) -> str:
        groups = {rank: self._groups(rank, now) for rank in ranks}
        samples = tuple(self._sample(rank, now).with_activity(groups[rank], None) for rank in ranks)
        return RankSamples(samples, group_calls(groups, now)).to_text()

    def _sample(self, rank: int, now: float) -> RankSample:
        return RankSample(
            rank,
            rank // self.per_host,
            f"node{rank // self.per_host}",
            100 + rank,
            "running",
            1 << 30,
            now,
            f"step {rank}: loss 0.1234",
            time=now,
            local_rank=rank % self.per_host,
            attempt=0,
            started=1.0,
            cpu_seconds=now,
        )

    def _stacks(self, rank: int) -> ProcessStacks:
        place = "all_reduce" if rank != self.ranks - 1 else "read_batch"
        frames = tuple(Frame(f"/app/module{at}.py", at, place if at == 0 else f"f{at}") for at in range(30))
        return ProcessStacks(rank, rank // self.per_host, 100 + rank, "", (ThreadStack("", frames),))

    def events(self) -> list[dict[str, object]]:
        """Return the events of a job with one attempt."""
        hosts = [
            {
                "replica": host,
                "hostname": f"node{host}",
                "first_rank": host * self.per_host,
                "pids": list(range(self.per_host)),
                "imported": [905.0, 908.0],
            }
            for host in range(self.ranks // self.per_host)
        ]
        exits = [{"rank": rank, "code": 0, "started": 909.0, "ended": 990.0} for rank in range(self.ranks)]
        return [
            {"time": 900.0, "kind": "submitted", "message": "", "seconds": 0.5},
            {"time": 904.0, "kind": "hosts", "message": "", "role": "trainer"},
            {"time": 909.0, "kind": "ranks", "message": "", "role": "trainer", "attempt": 0, "hosts": hosts},
            {"time": 910.0, "kind": "output", "message": "", "role": "trainer"},
            {"time": 990.0, "kind": "attempt_end", "message": "", "role": "trainer", "attempt": 0, "exits": exits},
            {"time": 991.0, "kind": "result", "message": "", "role": "trainer"},
        ]


def seconds(function: Callable[[], object], rounds: int) -> float:
    """Return the median of the processor time of a call."""
    taken = []
    for _ in range(rounds):
        started = time.process_time()
        function()
        taken.append(time.process_time() - started)
    return statistics.median(taken)


class Reader:
    """What replica 0 and a client do with the answers of hosts, which come from stdin; ``found`` has the times."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}
        self._size = 0

    def run(self, kind: str) -> dict[str, float]:
        getattr(self, kind)()
        self.found[f"{kind}: in all"] = sum(self.found.values())
        self.found[f"{kind}: MiB from hosts"] = self._size / (1 << 20)
        self.found[f"{kind}: peak MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return self.found

    def timed(self, name: str, function: Callable[[], T]) -> T:
        started = time.process_time()
        result = function()
        self.found[name] = 1000 * (time.process_time() - started)
        return result

    def _answers(self, request: type[Request[Any]]) -> Iterator[Any]:
        for line in sys.stdin.buffer:
            self._size += len(line)
            if line == b"\n":
                return
            if not line.startswith(b'{"frame"'):
                yield decode(request.answer_type(), messages.decode(line)["answer"])

    def collectives(self) -> None:
        read = self.timed("collectives: replica 0 reads", lambda: list(self._answers(ReadCollectives)))
        ranks = self.timed("collectives: ranks", lambda: [rank for answer in read for rank in answer.ranks()])
        hang = self.timed("collectives: diagnose", lambda: hangs.diagnose(ranks, 3.0))
        assert hang is not None and hang.ranks == (len(ranks) - 1,)

    def samples(self) -> None:
        def passed_on() -> list[bytes]:
            return [messages.encode({"samples": text}) for text in self._answers(SampleRanks)]

        before = read_samples(messages.decode(line)["samples"] for line in map(_line, passed_on()))
        lines = self.timed("samples: replica 0 passes on", passed_on)
        now = self.timed(
            "samples: client reads", lambda: read_samples(messages.decode(_line(line))["samples"] for line in lines)
        )
        activity = self.timed("samples: what ranks do", lambda: rank_sample.rank_views(now, before))
        assert activity[0].collectives_per_second == 0.0 and activity[-1].waited_for and activity[5].late_by
        status = JobStatus("monarch_slurm://torchx/1", "job", "RUNNING", activity=activity)
        view = JobFacts(AppSnapshot("1", "job", []), status, timeline.build([], ROLE, end=NOW))
        self.timed("samples: status", lambda: cli_status.render(status))
        self.timed("samples: status --json", lambda: json.dumps(status.to_json()))
        self.timed("samples: top", lambda: top.lines(view, 160))
        self.timed("samples: top --by-host", lambda: top.lines(view, 160, by_host=True))

    def stacks(self) -> None:
        def grouped() -> list[bytes]:
            shared = shared_stacks(itertools.chain(*self._answers(TakeStacks)))
            return [messages.encode({"stacks": [entry]}) for entry in shared]

        lines = self.timed("stacks: replica 0 reads", grouped)
        found = self.timed(
            "stacks: client reads", lambda: read_stacks(messages.decode(_line(line))["stacks"] for line in lines)
        )
        self.timed("stacks: show", lambda: stacks.render(found))


def _line(message: bytes) -> bytes:
    return message.splitlines()[-1]


KINDS = {"collectives": ("collectives",), "samples": ("samples_before", "samples"), "stacks": ("stacks",)}
"""What is read, and the answers of which it consists: rates follow from two samples."""


def read_answers(kind: str, job: Job) -> dict[str, float]:
    """Return what is measured in a process that gets the answers of all hosts."""
    with subprocess.Popen(
        [sys.executable, __file__, "--answers", kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        for request in KINDS[kind]:
            process.stdin.writelines(job.answers(request))
            process.stdin.write(b"\n")
        process.stdin.close()
        found: dict[str, float] = json.load(process.stdout)
        return found


def report(job: Job) -> str:
    """Return the page of a report, of the events as they are read."""
    drawn = timeline.build(json.loads(json.dumps(job.events())), ROLE, end=991.0)
    return page_of(
        JobFacts(AppSnapshot("1", "job", []), JobStatus("monarch_slurm://torchx/1", "job", "SUCCEEDED"), drawn)
    )


def measure(ranks: int, per_host: int, rounds: int) -> dict[str, float]:
    """Return what is measured of a job of so many ranks, by name."""
    job = Job(ranks, per_host)
    found: dict[str, float] = {}
    for kind in KINDS:
        rounds_of = [read_answers(kind, job) for _ in range(rounds)]
        found.update({name: statistics.median(times[name] for times in rounds_of) for name in rounds_of[0]})
    found["events: KiB of an attempt"] = len(json.dumps(job.events())) / 1024
    found["report: write"] = 1000 * seconds(lambda: report(job), rounds)
    found["report: KiB"] = len(report(job)) / 1024

    with get_runner() as runner:
        app = spmd("train.py", j=f"{ranks}x8")
        runner.dryrun(app, "monarch_slurm", {"partition": "p"})  # imports
        found["Slurm: dry run of as many nodes"] = 1000 * seconds(
            lambda: str(runner.dryrun(app, "monarch_slurm", {"partition": "p"})), rounds
        )
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[256, 1024, 4096], help="default: 256 1024 4096")
    parser.add_argument("--per-host", type=int, default=8, help="ranks of each host (default: 8)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: 5)")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--answers", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answers:
        print(json.dumps(Reader().run(args.answers)))
        return
    if min(args.rounds, args.per_host) < 1 or any(n < args.per_host or n % args.per_host for n in args.ranks):
        parser.error("--rounds and --per-host must be 1 or more, and --ranks multiples of --per-host")
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.2f}; {args.per_host} ranks on each host")
    sizes = sorted(set(args.ranks))
    found = {ranks: measure(ranks, args.per_host, args.rounds) for ranks in sizes}
    print(f"{'ranks':<36}{''.join(f'{ranks:>10}' for ranks in sizes)}{'growth':>10}")
    for name, least in found[sizes[0]].items():
        growth = found[sizes[-1]][name] / least / (sizes[-1] / sizes[0]) if least else 0.0
        print(f"{name:<36}{''.join(f'{found[ranks][name]:>10.2f}' for ranks in sizes)}{growth:>10.2f}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
