# SPDX-License-Identifier: BSD-3-Clause
"""``--max-restarts`` on one host: who runs how often, with which environment and files, and how it ends."""

from __future__ import annotations

import json
import re
import signal

import pytest

from tests.conformance.differences import Difference, differs
from tests.conformance.launchers import LOGS, Job, Launchers, Outcome
from tests.conformance.test_environment import DIFFERENT

START = """
import json, signal, time
rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def handle(number, frame):
    mark(f"{attempt} {signal.Signals(number).name}")
    sys.exit(0)
for number in (1, 2, 3, 15):
    signal.signal(number, handle)
def fail(code):
    '''End with a code once the other rank sleeps.'''
    wait_for(f"asleep{attempt}")
    sys.exit(code)
def kill():
    wait_for(f"asleep{attempt}")
    os.kill(os.getpid(), 9)
def sleep():
    open(f"asleep{attempt}", "w")
    rest()
mark(f"{attempt} begins")
"""


def attempts_of(outcome: Outcome) -> list[list[str]]:
    """The marks of every attempt, sorted; none of an attempt may come after one of the next."""
    numbers = [int(mark.split()[1]) for mark in outcome.marks()]
    assert numbers == sorted(numbers), outcome.marks()
    return [
        sorted(mark for mark, its in zip(outcome.marks(), numbers, strict=True) if its == attempt)
        for attempt in range(max(numbers, default=-1) + 1)
    ]


ENDS_WELL = """
def lives(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
if attempt == 0 and rank == "0":
    open("pid.new", "w").write(str(os.getpid()))
    os.rename("pid.new", "pid")
if attempt == 0 and rank == "1":
    wait_for("pid")
    while lives(open("pid").read()):
        time.sleep(0.01)
    sys.exit(9)
"""
"""Rank 1 fails once rank 0 has ended well."""

CASES = {
    "another rank and code each time": ("2", "fail(3 + attempt) if rank == str(attempt % 2) else sleep()", 3, 5),
    "succeeds at last": ("3", "if attempt < 2: fail(3) if rank == '1' else sleep()", 3, 0),
    "after a rank has ended well": ("1", ENDS_WELL, 2, 0),
    "killed": ("1", "if attempt == 0: kill() if rank == '1' else sleep()", 2, 0),
    "exception": ("1", "wait_for('asleep%d' % attempt) if rank == '1' else sleep()\nraise ValueError('x')", 2, 1),
}


@differs(Difference.EXIT_CODE)
@pytest.mark.parametrize("case", CASES)
def test_restarts(case: str, both: Launchers) -> None:
    budget, body, attempts, code = CASES[case]
    theirs, ours = both.script(START + body, "--max-restarts", budget, preload="")
    assert attempts_of(ours) == attempts_of(theirs)
    assert len(attempts_of(ours)) == attempts
    assert (theirs.code, ours.code) == (min(code, 1), code), ours.err.decode()


@differs(Difference.NEW_STORE, Difference.STORE)
def test_environment_of_each_attempt(both: Launchers) -> None:
    body = """
        json.dump(dict(os.environ), open(f"env.{rank}.{attempt}", "w"))
        fail(1) if rank == "1" and attempt < 2 else sleep() if attempt < 2 else 0
    """
    # Spares are started during an attempt: what they have in their environment must be no other either.
    theirs, ours = both.script(START + _dedent(body), environ={"PET_MAX_RESTARTS": "2"}, preload="")
    ports: dict[str, set[str]] = {"torchrun": set(), "host": set()}
    for name in (f"env.{rank}.{attempt}" for rank in range(2) for attempt in range(3)):
        their, our = (json.loads(outcome.files[name]) for outcome in (theirs, ours))
        assert our["TORCHELASTIC_RESTART_COUNT"] == name[-1]
        different = {variable for variable in {*their, *our} if their.get(variable) != our.get(variable)}
        assert different == {*DIFFERENT, "TORCHELASTIC_USE_AGENT_STORE"}
        ports["torchrun"].add(their["MASTER_PORT"])
        ports["host"].add(our["MASTER_PORT"])
    # The kernel chooses a free port for each attempt, and may choose the same again.
    assert len(ports["torchrun"]) == 1 < len(ports["host"])


@differs(Difference.EVIDENCE, Difference.RESTART_DELAY)
def test_files_of_each_attempt(both: Launchers) -> None:
    body = """
        print("out", rank, attempt)
        print("err", rank, attempt, file=sys.stderr)
        sys.stdout.flush()
        fail(1) if rank == "1" and attempt < 2 else sleep() if attempt < 2 else 0
    """
    theirs, ours = both.script(START + _dedent(body), "--max-restarts", "2", *LOGS, preload="")

    def logs(outcome: Outcome) -> dict[str, bytes]:
        paths = [path for path in outcome.files if path.startswith("logs/")]
        return {re.sub(r"^logs/[^/]+/", "", path): outcome.files[path] for path in paths}

    kept = {path for path in ours.files if path.endswith("/stacks.txt")}
    assert len(kept) == 2
    for path in kept:
        assert b"rank 0" in ours.files.pop(path)
    assert logs(ours) == logs(theirs)
    assert logs(ours)["attempt_1/0/stderr.log"] == b"err 0 1\n"
    assert len(logs(ours)) == 3 * 2 * 2
    assert [b"the restart waits" in outcome.err for outcome in (theirs, ours)] == [False, True]


@differs(Difference.SIGNALLED)
def test_signal_to_the_launcher_in_a_later_attempt(both: Launchers) -> None:
    def during(job: Job) -> None:
        job.await_marks("0 1 ready", "1 1 ready")
        job.signal(signal.SIGTERM)

    body = """
        if attempt == 0:
            fail(1) if rank == "1" else sleep()
        mark("1 ready")
        sleep()
    """
    theirs, ours = both.script(START + _dedent(body), "--max-restarts", "3", preload="", during=during)
    assert attempts_of(ours) == attempts_of(theirs)
    assert attempts_of(ours)[1:] == [
        ["0 1 SIGTERM", "0 1 begins", "0 1 ready", "1 1 SIGTERM", "1 1 begins", "1 1 ready"]
    ]
    assert (theirs.code, ours.code) == (1, 143)


@differs(Difference.NEW_STORE)
def test_store_of_each_attempt(both: Launchers) -> None:
    body = """
        import torch.distributed as dist
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        report(store.add(f"runs of {rank}", 1))
        fail(1) if rank == "1" and attempt < 1 else sleep() if attempt < 1 else 0
    """
    theirs, ours = both.script(START + _dedent(body), "--max-restarts", "1")
    assert theirs.reports == {0: 2, 1: 2}
    assert ours.reports == {0: 1, 1: 1}
    assert theirs.code == ours.code == 0


@differs(Difference.NOT_BEGUN)
@pytest.mark.parametrize("program", ["prog.py", "-m no.such.module"])
def test_program_that_cannot_begin(program: str, both: Launchers) -> None:
    words = ["--nproc-per-node", "1", "--max-restarts", "1", *LOGS, *program.split()]
    theirs, ours = both(words, {"prog.py": "def f(:\n"}, preload="")
    assert (theirs.code, ours.code) == (1, 1)
    assert [any("/attempt_1/" in path for path in outcome.files) for outcome in (theirs, ours)] == [True, False]


def _dedent(body: str) -> str:
    return re.sub(r"(?m)^        ", "", body)
