# SPDX-License-Identifier: BSD-3-Clause
"""Two hosts, with a launcher each: torchrun's two agents on this machine beside two host processes."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from tests.conformance.differences import Difference, differs
from tests.conformance.launchers import Job, Launchers, Outcome
from tests.conformance.test_environment import DIFFERENT, environments


@pytest.mark.parametrize("rdzv", [pytest.param("static", marks=pytest.mark.nightly("4 s of processor time")), "c10d"])
def test_environment(rdzv: str, both: Launchers) -> None:
    # With the c10d backend, torchrun numbers its agents as they happen to come; the variables of a rank do not show it.
    theirs, ours = both.script("report(dict(os.environ))", "--role", "r", nodes=2, rdzv=rdzv, preload="")
    assert theirs.codes == ours.codes == [0, 0]
    # MASTER_PORT of the static rendezvous is the user's, a new one for each launch here.
    expected = {*DIFFERENT, "TORCHELASTIC_USE_AGENT_STORE"} - {"TORCHELASTIC_RUN_ID"}
    if rdzv != "c10d":
        expected.remove("MASTER_ADDR")
    assert sorted(ours.reports) == [0, 1, 2, 3]
    for their, our in zip(environments(theirs), environments(ours), strict=True):
        assert {name for name in {*their, *our} if their.get(name) != our.get(name)} == expected


@pytest.mark.nightly("3 s of processor time; tests/network trains on two machines every time")
def test_process_group(both: Launchers) -> None:
    body = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        ones = torch.ones(1)
        dist.all_reduce(ones)
        report([dist.get_rank(), ones.item()])
        dist.barrier()
        dist.destroy_process_group()
    """
    theirs, ours = both.script(body, nproc=1, nodes=2)
    assert theirs.codes == ours.codes == [0, 0], ours.err.decode()
    assert theirs.reports == ours.reports == {0: [0, 2.0], 1: [1, 2.0]}


FAILS = """
    import signal
    rank = os.environ["RANK"]
    def handle(*_):
        mark("SIGTERM")
        sys.exit(0)
    signal.signal(15, handle)
    open(f"pid{rank}", "w").write(str(os.getpid()))
    mark("ready")
    if rank == "2":
        wait_for("go")
        sys.exit(5)
    rest()
"""


@differs(Difference.OTHER_HOSTS, Difference.EXIT_CODE)
def test_rank_that_fails_on_the_second_host(both: Launchers) -> None:
    """torchrun's second agent stops its own ranks and ends; the first is told by nobody, and by a signal here."""

    def during(job: Job) -> None:
        job.await_marks(*(f"{rank} ready" for rank in range(4)))
        (job.work / "go").touch()
        job.await_marks("3 SIGTERM")
        if job.under == "torchrun":
            time.sleep(2)
            pids = [int((job.work / f"pid{rank}").read_text()) for rank in range(2)]
            job.notes["alive"] = [psutil.pid_exists(pid) for pid in pids]
            os.kill(job.pids[0], signal.SIGTERM)

    theirs, ours = both.script(FAILS, nodes=2, rdzv="static", preload="", during=during)
    assert theirs.notes == {"alive": [True, True]}
    assert (theirs.codes, ours.codes) == ([1, 1], [5, 5])
    assert sorted(ours.marks()) == sorted(theirs.marks())
    assert b"exitcode  : 5" in theirs.err.partition(b"Root Cause")[2]
    assert ours.error["message"].startswith("rank 2 (local rank 0 on ")


@differs(Difference.OTHER_HOSTS, Difference.SIGNALLED)
def test_signal_to_the_launcher_of_the_second_host(both: Launchers) -> None:
    def during(job: Job) -> None:
        job.await_marks(*(f"{rank} ready" for rank in range(4)))
        job.signal(signal.SIGTERM, node=1)
        job.await_marks("2 SIGTERM", "3 SIGTERM")
        if job.under == "torchrun":
            job.signal(signal.SIGTERM)

    theirs, ours = both.script(FAILS, nodes=2, rdzv="static", preload="", during=during)
    assert (theirs.codes, ours.codes) == ([1, 1], [143, 143])
    assert sorted(ours.marks()) == sorted(theirs.marks())


@differs(Difference.SEVERAL_HOSTS)
def test_restart_after_a_failure_on_one_host(both: Launchers) -> None:
    body = """
        rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
        again = os.path.exists(f"ran{rank}")
        open(f"ran{rank}", "w")
        mark(f"{'second' if again else 'first'} run, restart count {attempt}")
        if not again:
            if rank == "2":
                for other in "013":
                    wait_for(f"ran{other}")
                os._exit(5)
            rest()
    """
    theirs, ours = both.script(body, "--max-restarts", "1", preload="", nodes=2)
    assert theirs.codes == ours.codes == [0, 0], ours.err.decode()

    def counts(outcome: Outcome) -> list[list[str]]:
        runs = (sorted(mark for mark in outcome.marks() if f" {which} run" in mark) for which in ("first", "second"))
        return [[mark[-1] for mark in run] for run in runs]

    # On the host that has not failed, whichever of the two torchrun has numbered first, the count stays 0.
    assert counts(theirs)[0] == ["0"] * 4
    assert counts(theirs)[1] == ["0", "0", "1", "1"]
    assert counts(ours) == [["0"] * 4, ["1"] * 4]
