# SPDX-License-Identifier: BSD-3-Clause
"""What grows with the ranks of a job: ``python bench/scale.py [--ranks N ...] [--per-host K] [--rounds N]``.

Replica 0 and the clients get what simulated hosts would tell them: answers as JSON, samples, stacks, collectives and
events of so many ranks. Each part is measured alone, in this process; the table has the medians over the rounds, in
milliseconds of one core unless a name says otherwise, and how much more the largest job takes than the smallest,
divided by how many more ranks it has: 1 is linear. ``bench/rendezvous.py`` measures connections.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchx.runner import get_runner

from torchx_monarch.backends.core.snapshot import AppSnapshot
from torchx_monarch.cli import top
from torchx_monarch.cli.jobs import JobFacts
from torchx_monarch.components import spmd
from torchx_monarch.controller.host_messages import CollectivesRead, ReadCollectives, Request, SampleRanks, TakeStacks
from torchx_monarch.insight import hangs, rank_sample, report_page, stacks, timeline
from torchx_monarch.insight.hangs import RankCollectives
from torchx_monarch.insight.rank_sample import Collective, GroupStatus, RankSample
from torchx_monarch.insight.stacks import Frame, ProcessStacks, ThreadStack
from torchx_monarch.model.codec import decode
from torchx_monarch.model.role_spec import RoleSpec, WorkloadKind
from torchx_monarch.schedulers.job_status import JobStatus
from torchx_monarch.transport import messages

NOW = 1000.0

ROLE = [RoleSpec("trainer", workload=WorkloadKind.RANKS)]


class Job:
    """A job of simulated ranks, of which the last one has not called the collective in which the others wait.

    Args:
        ranks: number of ranks.
        per_host: number of ranks of each host.
    """

    def __init__(self, ranks: int, per_host: int) -> None:
        self.ranks, self.per_host = ranks, per_host
        self.samples = [self._sample(rank, NOW) for rank in range(ranks)]
        self.before = [self._sample(rank, NOW - 2) for rank in range(ranks)]
        self.collectives = [RankCollectives(sample.rank, NOW, sample.groups) for sample in self.samples]
        self.stacks = [self._stacks(rank) for rank in range(ranks)]

    def by_host(self, all_of_them: Sequence[object]) -> list[tuple[object, ...]]:
        """Return what each host tells of its ranks."""
        return [tuple(all_of_them[at : at + self.per_host]) for at in range(0, self.ranks, self.per_host)]

    def _sample(self, rank: int, now: float) -> RankSample:
        called = tuple(Collective(number, "nccl:all_reduce", ((1024,),), now - 20 + number) for number in range(16))
        waits = rank != self.ranks - 1
        first = rank - rank % self.per_host
        groups = (
            GroupStatus("0", f"0-{self.ranks - 1}", 15 if waits else 14, 14, called[-1] if waits else None, called),
            GroupStatus("1", f"{first}-{first + self.per_host - 1}", 7, 7, None, called[:8]),
            GroupStatus("2", f"{rank % self.per_host}-{self.ranks - 1}:{self.per_host}", 9, 9, None, called[:9]),
        )
        return RankSample(
            *(now, rank, rank % self.per_host, rank // self.per_host, f"node{rank // self.per_host}", 100 + rank, 0),
            *("running", 1.0, now, 1 << 30, now, f"step {rank}: loss 0.1234"),
            groups=groups,
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


def report(job: Job) -> str:
    """Return the page of a report, of the events as they are read."""
    drawn = timeline.build(json.loads(json.dumps(job.events())), ROLE, end=NOW)
    ranks = drawn.spans_of("rank")
    texts = dict.fromkeys(("cause", "traceback", "log", "written"), "")
    lists: dict[str, list[object]] = {name: [] for name in ("facts", "runs", "stacks")}
    page = {
        **texts,
        **lists,
        "name": "job",
        "handle": "monarch_slurm://torchx/1",
        "state": "SUCCEEDED",
        "headline": "SUCCEEDED after 90 s",
        "rows": report_page.rows_of(drawn),
        "ticks": report_page.ticks(drawn.job.seconds),
        "roles": [{"name": "trainer", "lost": "", "shares": report_page.shares(drawn, "trainer")}],
        "moments": drawn.moments,
        "ranks": ranks[:512],
        "ranks_left_out": max(0, len(ranks) - 512),
    }
    return report_page.render(page, drawn.job)


def measure(ranks: int, per_host: int, rounds: int) -> dict[str, float]:
    """Return what is measured of a job of so many ranks, by name."""
    job = Job(ranks, per_host)
    found: dict[str, float] = {}

    def told(name: str, request: type[Request[Any]], answers: list[Any]) -> None:
        """Measure what it costs replica 0 to read the answers of all hosts."""
        lines = [messages.encode({"answer": answer}) for answer in answers]
        found[f"{name}: KiB from a host"] = sum(map(len, lines)) / len(lines) / 1024

        def read() -> None:
            for line in lines:
                decode(request.answer_type(), json.loads(line.splitlines()[-1])["answer"])

        found[f"{name}: replica 0 reads"] = 1000 * seconds(read, rounds)

    told("samples", SampleRanks, list(job.by_host(job.samples)))
    told("stacks", TakeStacks, list(job.by_host(job.stacks)))
    told("collectives", ReadCollectives, [CollectivesRead(5.0, of_host) for of_host in job.by_host(job.collectives)])  # type: ignore[arg-type]
    told("looks for a hang", ReadCollectives, [CollectivesRead(5.0, ())] * (ranks // per_host))

    def diagnose() -> None:
        hang = hangs.diagnose(job.collectives, 3.0)
        assert hang is not None and hang.ranks == (ranks - 1,)

    found["hang: diagnose"] = 1000 * seconds(diagnose, rounds)
    found["stacks: group and show"] = 1000 * seconds(lambda: stacks.render(job.stacks), rounds)
    activity = rank_sample.rank_views(job.samples, job.before)
    status = JobStatus("monarch_slurm://torchx/1", "job", "RUNNING", activity=activity)
    view = JobFacts(AppSnapshot("1", "job", []), status, timeline.build([], ROLE, end=NOW))
    found["what ranks do"] = 1000 * seconds(lambda: rank_sample.rank_views(job.samples, job.before), rounds)
    found["top: screen"] = 1000 * seconds(lambda: top.lines(view, 160), rounds)
    found["top: screen by host"] = 1000 * seconds(lambda: top.lines(view, 160, by_host=True), rounds)
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
    args = parser.parse_args()
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
