# SPDX-License-Identifier: BSD-3-Clause
"""Roles that begin again together, where each host process is started again by itself, as dockerd and Kubernetes do."""

from __future__ import annotations

import json
import os
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.local.hosts import Hosts
from tests.waits import until

AGAIN = ("sh", "-c", 'for start in 0 1; do "$@" && exit 0; code=$?; done; exit $code', "again")
"""One retry."""

PROGRAM = """
    import os, signal, sys, time
    folder, role = sys.argv[1:]
    me = role + os.environ["RANK"]

    def say(what):
        with open(folder + "/said", "a") as file:
            file.write(f"{what} {me}\\n")

    def stopped(*_):
        time.sleep(2.0 if role == "SLOW" else 0.0)
        say("end")
        os._exit(1)

    signal.signal(signal.SIGTERM, stopped)
    say("begin")
    start = open(folder + "/said").read().count(f"begin {me}\\n")
    while open(folder + "/said").read().count("begin") < start * 4:
        time.sleep(0.02)
"""


@pytest.fixture
def roles(folder: Path, tmp_path: Path) -> Callable[..., tuple[Hosts, Hosts]]:
    """Two roles of two hosts each; what their ranks do when all four have begun, and which role is slow to end."""

    def make(
        then: str, slow: str = "", wrapper: tuple[str, ...] = AGAIN, grace: int = 60, sidecar: str = "off"
    ) -> tuple[Hosts, Hosts]:
        path = tmp_path / "prog.py"
        path.write_text(textwrap.dedent(PROGRAM).replace("SLOW", slow) + textwrap.dedent(then))
        made = []
        for name in ("trainer", "reader"):
            (folder / name).mkdir()
            server = ("--application", f"unix:{folder}/trainer.sock", "--sidecar", sidecar)
            options = (
                "--grace",
                str(grace),
                "--preload",
                "",
                "--role",
                name,
                "--host-timeout",
                "120",
                *(("--peer-roles", "1") if name == "trainer" else server),
            )
            environ = {"MONARCH_RENDEZVOUS": f"unix:{folder}/{name}.sock"}
            command = ["torchrun", "--nnodes", "2", "--nproc-per-node", "1", "--tee", "3", str(path)]
            command += [str(folder), name]
            made.append(Hosts(folder / name, command, 2, options, environ, wrapper=wrapper))
        return made[0], made[1]

    return make


def starts(folder: Path) -> list[list[str]]:
    """What was said in each start: its beginnings, and after all of them its ends."""
    found: list[list[str]] = []
    said = folder / "said"  # the first rank creates it, and writes to it a moment later
    for line in said.read_text().splitlines() if said.exists() else ():
        if line.startswith("begin") and (not found or found[-1][-1].startswith("end")):
            found.append([])
        found[-1].append(line)
    return found


def begins(start: list[str]) -> list[str]:
    return sorted(line for line in start if line.startswith("begin"))


ALL = ["begin reader0", "begin reader1", "begin trainer0", "begin trainer1"]


def test_all_begin_again_when_one_role_has_failed_and_none_before_the_others_are_gone(
    folder: Path, roles: Callable[..., tuple[Hosts, Hosts]]
) -> None:
    then = """
        if me == "reader1" and start == 1:
            raise ValueError("boom")
        if start == 1:
            time.sleep(1000)
    """
    trainer, reader = roles(then, slow="trainer")
    reader.start()
    trainer.start()
    logs = trainer.wait(), reader.wait(), trainer.err(), reader.err()
    assert logs[:2] == ([0, 0], [0, 0]), logs
    first, second = starts(folder)
    assert begins(first) == begins(second) == ALL
    assert len(first) == 7, first  # the one that failed did not say so
    assert "FAILED: reader/1 failed: rank 1 (local rank 0 on " in trainer.err(), trainer.err()
    assert "ValueError: boom; all roles end with it, and begin again while retries are left" in trainer.err()
    assert all(hosts.err().count("FAILED") == 1 for hosts in (trainer, reader))


def test_a_lost_replica_0_is_a_failure_of_its_role(folder: Path, roles: Callable[..., tuple[Hosts, Hosts]]) -> None:
    trainer, reader = roles("""
        if start == 1:
            time.sleep(1000)
    """)
    trainer.start()
    reader.start()
    until(lambda: [len(start) for start in starts(folder)] == [4], "all ranks")
    (host,) = Path(f"/proc/{reader.processes[0].pid}/task/{reader.processes[0].pid}/children").read_text().split()
    os.kill(int(host), signal.SIGKILL)
    logs = trainer.wait(), reader.wait(), trainer.err(), reader.err()
    assert logs[:2] == ([0, 0], [0, 0]), logs
    assert begins(starts(folder)[-1]) == ALL, starts(folder)
    assert "replica 0 of role 'reader' was lost" in trainer.err()


def test_retries_are_spent_together_and_the_cause_is_told_from_what_followed(
    folder: Path, roles: Callable[..., tuple[Hosts, Hosts]]
) -> None:
    trainer, reader = roles("""
        if me == "reader0":
            sys.exit(7)
        time.sleep(1000)
    """)
    trainer.start()
    reader.start()
    assert (trainer.wait(), reader.wait()) == ([7, 7], [7, 7]), trainer.err() + reader.err()
    assert [begins(start) for start in starts(folder)] == [ALL, ALL]
    said = {hosts: json.loads((hosts.logs(0) / "error.json").read_text())["message"] for hosts in (trainer, reader)}
    assert [said[hosts]["extraInfo"]["consequence"] for hosts in (trainer, reader)] == [True, False]
    assert said[trainer]["message"].startswith("reader/0 failed: rank 0 ")


def test_a_first_role_that_has_succeeded_disturbs_nobody(
    folder: Path, roles: Callable[..., tuple[Hosts, Hosts]]
) -> None:
    trainer, reader = roles(f"""
        if role == "reader":
            while not os.path.exists("{folder}/go"):
                time.sleep(0.05)
    """)
    reader.start()
    trainer.start()
    assert trainer.wait() == [0, 0], trainer.err()
    assert all(process.poll() is None for process in reader.processes.values())
    (folder / "go").touch()
    assert reader.wait() == [0, 0], reader.err()
    assert len(starts(folder)) == 1


@pytest.mark.parametrize("how", ["succeeds", "fails", "is lost"])
def test_a_sidecar_ends_with_the_first_role(folder: Path, roles: Callable[..., tuple[Hosts, Hosts]], how: str) -> None:
    """Nobody else tells it."""
    codes = {"succeeds": [0, 0], "fails": [7, 7], "is lost": [-9, 1]}
    then = f"""
        if role == "reader":
            time.sleep(1000)
        if {how == "is lost"} and me == "trainer0":
            os.kill(os.getppid(), signal.SIGKILL)
        sys.exit({7 if how == "fails" else 0})
    """
    trainer, reader = roles(then, wrapper=(), sidecar="on")
    reader.start()
    trainer.start()
    assert trainer.wait() == codes[how], trainer.err()
    assert reader.wait() == [abs(codes[how][1])] * 2, reader.err()
    assert len(starts(folder)) == 1


def test_all_that_are_told_to_stop_stop_at_once(folder: Path, roles: Callable[..., tuple[Hosts, Hosts]]) -> None:
    """As by a cancel, which tells every host; and as by one who takes a machine away."""
    trainer, reader = roles("time.sleep(1000)", wrapper=(), grace=1000)
    trainer.start()
    reader.start()
    until(lambda: [len(start) for start in starts(folder)] == [4], "all ranks")
    reader.processes[1].send_signal(signal.SIGTERM)
    assert (trainer.wait(), reader.wait()) == ([143, 143], [143, 143]), trainer.err() + reader.err()
    assert "STOPPED: reader/1 failed: preempted" in trainer.err()
    trainer.start()
    reader.start()
    until(lambda: len(starts(folder)) == 2 and len(starts(folder)[1]) == 4, "all ranks again")
    for process in [*trainer.processes.values(), *reader.processes.values()]:
        process.send_signal(signal.SIGTERM)
    assert (trainer.wait(), reader.wait()) == ([143, 143], [143, 143]), trainer.err() + reader.err()
