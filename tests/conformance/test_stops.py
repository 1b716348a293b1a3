# SPDX-License-Identifier: BSD-3-Clause
"""How ranks are stopped: by the failure of another, by a signal to the launcher; and what is left of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.conformance.differences import Difference, differs
from tests.conformance.launchers import Job, Launchers, Outcome
from tests.waits import until as eventually  # the recording knows the source of the steps

HANDLER = """
import signal, time
rank = os.environ["RANK"]
def handle(number, frame):
    mark(signal.Signals(number).name)
    on_signal(number)
def on_signal(number):
    raise SystemExit(0)
"""

SLEEP = """
mark("ready")
rest()
"""


def is_ready(job: Job) -> None:
    job.await_marks("0 ready", "1 ready")


def then(*numbers: int) -> Callable[[Job], None]:
    """Signal the launcher when its ranks are ready."""

    def during(job: Job) -> None:
        is_ready(job)
        for number in numbers:
            job.signal(number)

    return during


def marks_of(outcome: Outcome) -> list[str]:
    """What the ranks marked after they were ready."""
    return sorted(mark for mark in outcome.marks() if not mark.endswith(" ready"))


FAILURES = {"sys.exit(3)": 3, "raise ValueError('x')": 1, "os.kill(os.getpid(), 9)": 137, "os._exit(7)": 7}


@differs(Difference.EXIT_CODE)
@pytest.mark.parametrize("end", FAILURES)
def test_others_get_sigterm_when_a_rank_fails(end: str, both: Launchers) -> None:
    body = (
        HANDLER
        + f"""
for number in (1, 2, 3, 10, 12, 15):
    signal.signal(number, handle)
if rank == "1":
    mark("ready")
    wait_for("zero")
    {end}
open("zero", "w")
{SLEEP}"""
    )
    theirs, ours = both.script(body, preload="")
    assert marks_of(ours) == marks_of(theirs) == ["0 SIGTERM"]
    assert (theirs.code, ours.code) == (1, FAILURES[end])


@differs(Difference.STACKS_SIGNAL)
def test_stacks_are_asked_for_before_a_rank_is_stopped(both: Launchers) -> None:
    body = """
        import signal, time
        if os.environ["RANK"] == "1":
            wait_for("zero")
            sys.exit(3)
        signal.signal(signal.SIGRTMAX - 3, lambda *_: mark("asked"))
        open("zero", "w")
        time.sleep(60)
    """
    theirs, ours = both.script(body, preload="", live=True)
    assert (theirs.marks(), ours.marks()) == ([], ["0 asked"])
    assert (theirs.code, ours.code) == (1, 3)


def test_rank_without_a_handler_dies_of_sigterm(both: Launchers) -> None:
    body = """
        import atexit, time
        atexit.register(mark, "at exit")
        if os.environ["RANK"] == "1":
            wait_for("zero")
            sys.exit(3)
        open("zero", "w")
        try:
            time.sleep(60)
        finally:
            mark("finally")
    """
    theirs, ours = both.script(body, preload="")
    assert ours.marks() == theirs.marks() == ["1 at exit"]
    assert ours.code == 3


def test_rank_that_ends_well_stops_nobody(both: Launchers) -> None:
    body = """
        import time
        if os.environ["RANK"] == "0":
            mark("end")
            open("ended", "w")
            sys.exit(0)
        wait_for("ended")
        time.sleep(1)
        mark("end")
    """
    theirs, ours = both.script(body, preload="")
    assert ours.marks() == theirs.marks() == ["0 end", "1 end"]
    assert ours.code == theirs.code == 0


def test_exit_code_of_a_stopped_rank_does_not_count(both: Launchers) -> None:
    body = (
        HANDLER
        + f"""
def on_signal(number):
    os._exit(77)
signal.signal(15, handle)
if rank == "1":
    wait_for("zero")
    sys.exit(3)
open("zero", "w")
{SLEEP}"""
    )
    theirs, ours = both.script(body, preload="")
    assert b"exitcode  : 3" in theirs.err.partition(b"Root Cause")[2]
    assert ours.code == 3


IGNORES = HANDLER + f"signal.signal(15, signal.SIG_IGN)\nopen('pid' + rank, 'w').write(str(os.getpid()))\n{SLEEP}"


def test_rank_that_ignores_sigterm_is_killed_after_the_time_out(both: Launchers) -> None:
    theirs, ours = both.script(IGNORES, "--shutdown-timeout", "1", preload="", during=then(15))
    assert marks_of(ours) == marks_of(theirs) == []
    assert (theirs.code, ours.code) == (1, 143)


@differs(Difference.SHUTDOWN_TIMEOUT)
def test_time_out_after_a_failure(both: Launchers) -> None:

    def during(job: Job) -> None:
        is_ready(job)
        os.kill(pid_in(job.work, "pid1"), signal.SIGKILL)
        if job.under == "torchrun":
            time.sleep(2.5)
            job.notes["alive"] = psutil.pid_exists(pid_in(job.work, "pid0"))
            os.kill(pid_in(job.work, "pid0"), signal.SIGKILL)

    theirs, ours = both.script(IGNORES, "--shutdown-timeout", "1", preload="", during=during)
    assert theirs.notes == {"alive": True}
    assert (theirs.code, ours.code) == (1, 137)


def test_rank_may_take_its_time(both: Launchers) -> None:
    body = (
        HANDLER
        + f"""
def on_signal(number):
    os.write(1, b"saving\\n")
    time.sleep(1)
    open("checkpoint", "w").close()
    sys.exit(0)
signal.signal(15, handle)
{SLEEP}"""
    )
    theirs, ours = both.script(body, "--shutdown-timeout", "20", preload="", during=then(15))
    assert marks_of(ours) == marks_of(theirs) == ["0 SIGTERM", "1 SIGTERM"]
    assert "checkpoint" in theirs.files
    assert "checkpoint" in ours.files
    assert ours.out == theirs.out == b"saving\nsaving\n"


@differs(Difference.SIGNALLED)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_signal_to_the_launcher_reaches_the_ranks(number: signal.Signals, both: Launchers) -> None:
    body = HANDLER + f"for number in (1, 2, 3, 10, 12, 15): signal.signal(number, handle)\n{SLEEP}"
    theirs, ours = both.script(body, preload="", during=then(number))
    assert marks_of(ours) == marks_of(theirs) == [f"0 {number.name}", f"1 {number.name}"]
    assert (theirs.code, ours.code) == (1, 128 + number)


def test_ctrl_c_is_a_keyboard_interrupt(both: Launchers) -> None:
    body = """
        import time
        try:
            mark("ready")
            time.sleep(60)
        except KeyboardInterrupt:
            mark("interrupted")
            raise
        finally:
            mark("finally")
    """
    theirs, ours = both.script(body, preload="", during=then(signal.SIGINT))
    expected = ["0 finally", "0 interrupted", "1 finally", "1 interrupted"]
    assert marks_of(ours) == marks_of(theirs) == expected
    assert ours.err.count(b"KeyboardInterrupt\n") == 2


def test_grandchildren_in_the_group_are_stopped(both: Launchers) -> None:
    body = """
        import subprocess, time
        if os.environ["RANK"] == "0":
            child = subprocess.Popen(["sh", "-c", "trap 'echo 0 child >> marks; exit' TERM; echo > zero; "
                "for i in $(seq 600); do sleep 0.1; done"])
            time.sleep(60)
        wait_for("zero")
        sys.exit(3)
    """
    theirs, ours = both.script(body, preload="")
    assert ours.marks() == theirs.marks() == ["0 child"]


def pid_in(folder: Path, name: str = "pid") -> int:
    return int((folder / name).read_text())


LEAVES_A_PROCESS = """
    import subprocess
    pid = subprocess.Popen(["sleep", "97"], stdout=2, stdin=0, start_new_session={session}).pid
    open("pid", "w").write(str(pid))
"""


@differs(Difference.LEFTOVERS)
@pytest.mark.parametrize("session", [False, True])
def test_process_that_a_rank_leaves_behind(session: bool, both: Launchers) -> None:
    theirs, ours = both.script(LEAVES_A_PROCESS.format(session=session), nproc=1, preload="", live=True)
    assert theirs.code == ours.code == 0
    leftover = psutil.Process(int(theirs.files["pid"]))
    assert leftover.name() == "sleep"
    leftover.kill()
    assert not psutil.pid_exists(int(ours.files["pid"]))


@differs(Difference.DEATH_WITH_HOST)
def test_launcher_killed(both: Launchers) -> None:

    def during(job: Job) -> None:
        is_ready(job)
        pids = [pid_in(job.work, f"pid{rank}") for rank in range(2)]
        job.signal(signal.SIGKILL)
        if job.under == "host":
            eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids), "the ranks' death")
        left = [pid for pid in pids if psutil.pid_exists(pid)]
        job.notes["left"] = len(left)
        for pid in left:
            os.kill(pid, signal.SIGKILL)

    body = f"import time; open('pid' + os.environ['RANK'], 'w').write(str(os.getpid()))\n{SLEEP}"
    theirs, ours = both.script(body, preload="", during=during)
    assert (theirs.code, ours.code) == (-9, -9)
    assert (theirs.notes["left"], ours.notes["left"]) == (2, 0)


@differs(Difference.SIGNALLED)
def test_ranks_that_end_well_after_a_signal(both: Launchers) -> None:
    """A checkpoint on SIGTERM and exit code 0, as Lightning and Slurm scripts do."""
    body = HANDLER + f"signal.signal(15, handle)\n{SLEEP}"
    theirs, ours = both.script(body, preload="", during=then(15))
    assert (theirs.code, ours.code) == (1, 143)


def test_handlers_installed_as_lightning_does(both: Launchers) -> None:
    """Only where nobody has one yet; SIGTERM raises in the training loop, the former handler is called again."""
    body = """
        import signal, threading, time
        class Stop(BaseException): pass
        def has_handler(number):
            return signal.getsignal(number) not in (None, signal.SIG_DFL)
        mark(f"has {has_handler(signal.SIGTERM)} {has_handler(signal.SIGUSR1)} {has_handler(signal.SIGCONT)}")
        former = signal.getsignal(signal.SIGTERM)
        received = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: received.set())
        signal.signal(signal.SIGUSR1, lambda *_: mark("requeue"))
        os.kill(os.getpid(), signal.SIGUSR1)
        mark("ready")
        while not received.is_set():
            time.sleep(0.02)
        signal.signal(signal.SIGTERM, former)
        mark(f"teardown {former is signal.SIG_DFL}")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    """
    theirs, ours = both.script(body, preload="", during=then(15))
    assert marks_of(ours) == marks_of(theirs)
    assert {"0 has False False False", "0 requeue", "0 teardown True", "1 teardown True"} <= set(marks_of(ours))


@differs(Difference.USER_SIGNALS)
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_user_signals_to_the_launcher(number: signal.Signals, both: Launchers) -> None:

    def during(job: Job) -> None:
        then(number)(job)
        if job.under == "torchrun":
            for rank in range(2):
                os.kill(pid_in(job.work, f"pid{rank}"), signal.SIGKILL)

    body = HANDLER + f"signal.signal({int(number)}, handle)\nopen('pid' + rank, 'w').write(str(os.getpid()))\n{SLEEP}"
    theirs, ours = both.script(body, preload="", during=during)
    assert (theirs.code, marks_of(theirs)) == (-number, [])
    assert (ours.code, marks_of(ours)) == (0, [f"0 {number.name}", f"1 {number.name}"])
