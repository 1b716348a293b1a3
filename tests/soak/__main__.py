# SPDX-License-Identifier: BSD-3-Clause
"""A soak: many small jobs with one or two faults in each: ``python -m tests.soak [options]``.

A job runs through monarch_local as any other. A fault is a signal to one of its processes (SIGKILL, SIGTERM, SIGSTOP
with SIGCONT later or without), a cancellation, or a deleted file; it comes at the start, in the run, at a restart or at
the end of the job, as its events tell. Then: the job must have ended in time, its state must be true (SUCCEEDED only if
every rank proved its end, FAILED only with who died, and only if it could not have gone on), its record must answer,
its logs must hold every line that a rank has proved to have printed, and nothing may be left of it. By default the jobs
contain every fault at every moment in every kind of job (``plans.cells``); the rest follows from the seed and a job's
number.

Exit code 1 when anything was wrong; what is needed to look into it is then kept and named.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
from collections import Counter, defaultdict

from tests.soak.plans import PHASES, cells, draw
from tests.soak.runs import Outcome, run_all

_PHASES = (*PHASES, "with")


def _summary(outcomes: list[Outcome]) -> None:
    by_fault: dict[str, list[Outcome]] = defaultdict(list)
    phases: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in outcomes:
        for fault in outcome.plan.faults:
            by_fault[fault.what].append(outcome)
        for injection in outcome.injections:
            phases[injection.fault.what][injection.fault.moment.phase] += 1
    print(f"\n{'fault':18}{'jobs':>5}" + "".join(f"{phase:>9}" for phase in _PHASES) + f"{'longest':>12}  states")
    for fault_name, some in sorted(by_fault.items()):
        states = Counter(outcome.state.name if outcome.state else "gone" for outcome in some)
        counts = "".join(f"{phases[fault_name][phase]:9}" for phase in _PHASES)
        shown = ", ".join(f"{name} {count}" for name, count in sorted(states.items()))
        longest = max(outcome.seconds for outcome in some)
        print(f"{fault_name:18}{len(some):5}{counts}{longest:10.1f} s  {shown}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=len(cells(1)), help="how many")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="what makes them the same again")
    parser.add_argument("--only", type=int, action="append", help="the number of one job; may be repeated")
    parser.add_argument("--parallel", type=int, default=3, help="how many at a time")
    args = parser.parse_args()
    temporary = tempfile.mkdtemp(prefix="tms", dir="/tmp")  # short, as paths of sockets must be
    os.environ["MONARCH_STATE_DIR"], os.environ["TMPDIR"] = f"{temporary}/state", f"{temporary}/tmp"
    tempfile.tempdir = None
    os.mkdir(f"{temporary}/tmp")
    print(f"seed {args.seed}; state in {temporary}", flush=True)
    outcomes: list[Outcome] = []

    def tell(outcome: Outcome) -> None:
        outcomes.append(outcome)
        print(outcome, flush=True)
        if outcome.wrong:
            print(f"     python -m tests.soak --seed {args.seed} --only {outcome.plan.number}")
            print(f"     {outcome.plan} {outcome.injections}\n     {outcome.kept}", flush=True)

    wrong = run_all(
        [draw(args.seed, number) for number in args.only or range(args.jobs)], args.parallel, tell, args.seed
    )
    left = [name for name in os.listdir(f"{temporary}/tmp")]
    wrong += [f"left in the folder for temporary files: {left}"] if left else []
    _summary(outcomes)
    bad = [outcome for outcome in outcomes if outcome.wrong]
    print("\n".join(wrong))
    print(f"seed {args.seed}: {len(outcomes)} jobs, {len(bad)} wrong: {[outcome.plan.number for outcome in bad]}")
    if bad or wrong:
        return 1
    shutil.rmtree(temporary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
