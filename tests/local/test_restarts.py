# SPDX-License-Identifier: BSD-3-Clause
"""Restarts of the ranks, and which rank is named as the cause of a failure."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.local.hosts import NO_PRELOAD, Hosts, torchrun
from tests.waits import until


def test_restarts_until_it_succeeds_and_keeps_every_attempts_logs(folder: Path, script: Callable[[str], str]) -> None:
    path = script("""
        import pathlib
        print("attempt", attempt, "of", os.environ["TORCHELASTIC_MAX_RESTARTS"])
        sys.stdout.flush()
        printed = pathlib.Path(sys.argv[0]).with_name(f"printed{attempt}")
        printed.mkdir(exist_ok=True)
        (printed / str(rank)).touch()
        if rank == 3 and attempt < 2:
            while len(list(printed.iterdir())) < 4:
                time.sleep(0.02)
            raise RuntimeError(f"failure {attempt}")
        if attempt < 2:
            time.sleep(1000)
    """)
    hosts = Hosts(folder, torchrun(path, restarts=3, nnodes=2), replicas=2, options=NO_PRELOAD).start()
    assert hosts.wait() == [0, 0], hosts.err()
    for attempt in range(3):
        for rank in range(4):
            logs = hosts.logs(rank // 2) / f"attempt_{attempt}" / str(rank)
            assert (logs / "stdout.log").read_text() == f"attempt {attempt} of 3\n"
            assert (logs / "error.json").exists() == (rank == 3 and attempt < 2)
    restarts = [event for event in hosts.events() if event["kind"] == "rank_restart"]
    assert [(event["attempt"], event["rank"]) for event in restarts] == [(1, 3), (2, 3)]
    assert "restart 2 of 3 after: rank 3" in hosts.err()
    waits = [line for line in hosts.err().splitlines() if "the restart waits" in line]
    assert len(waits) == 1 and "s: the last attempt failed after " in waits[0]  # the first restart is immediate
    assert "failure 1" in hosts.err()


def test_one_budget_for_the_whole_job(folder: Path, script: Callable[[str], str]) -> None:
    # A rank of the first host fails, then one of the second: torchrun, which counts per agent, would go on.
    path = script("""
        if attempt != 2 and rank == 2 * (attempt % 2):
            sys.exit(10 + attempt)
        time.sleep(1000)
    """)
    options = (*NO_PRELOAD, "--replacements", "1")
    hosts = Hosts(folder, torchrun(path, restarts=2, nnodes=2), replicas=2, options=options).start()
    until(lambda: sum(event["kind"] == "ranks" for event in hosts.events()) == 3, "the third attempt")
    assert hosts.err().count("[monarch] restart ") == 2
    hosts.lose(0)  # another replica 0 has no budget of its own
    hosts.environ["MONARCH_RESTART"] = "1"
    hosts.start(0)
    assert hosts.wait() == [13, 13], hosts.err()


@pytest.mark.parametrize(
    ("body", "options", "code", "attempts", "reason"),
    [
        ("sys.exit(4 - attempt)", ("--retry-on", "4,137"), 3, 2, "no restart: exit code 3 is not one of 4, 137"),
        ("os.kill(os.getpid(), signal.SIGKILL)", ("--retry-on", "SIGKILL"), 137, 4, ""),
        # It may be a file system that hiccuped: the first line of the program has run.
        ("import no_such", (), 1, 4, ""),
    ],
)
def test_exit_codes_that_are_not_retried(
    folder: Path,
    script: Callable[[str], str],
    body: str,
    options: tuple[str, ...],
    code: int,
    attempts: int,
    reason: str,
) -> None:
    path = script(f"if rank:\n    {body}\ntime.sleep(1000)")
    hosts = Hosts(folder, torchrun(path, restarts=3), options=(*NO_PRELOAD, *options)).start()
    assert hosts.wait() == [code]
    assert len(list(hosts.logs(0).glob("attempt_*"))) == attempts
    assert reason in hosts.err() and ("no restart" in hosts.err()) == bool(reason)


def test_a_working_folder_that_is_deleted_is_named(folder: Path, script: Callable[[str], str], tmp_path: Path) -> None:
    path = script("os.rmdir(os.getcwd())\nsys.exit(1)")
    (cwd := tmp_path / "cwd").mkdir()
    enter = ("sh", "-c", 'cd "$1"; shift; exec "$@"', "sh", str(cwd))
    hosts = Hosts(folder, torchrun(path, nproc=1, restarts=1), options=NO_PRELOAD, wrapper=enter).start()
    assert hosts.wait() == [1]
    assert f"FAILED: the working folder is gone: {cwd} (deleted)" in hosts.err()


def test_a_rank_that_fails_to_join_twice_in_a_row_is_started_again_if_it_was_in_a_group_before(
    folder: Path, script: Callable[[str], str]
) -> None:
    """One that was in none is not: tests/conformance/test_ends.py."""
    path = script("""
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method="none://")
    """)
    command = ["torchrun", "--max-restarts", "2", path]
    hosts = Hosts(folder, command).start()
    assert hosts.wait() == [1]
    assert len(list(hosts.logs(0).glob("attempt_*"))) == 3, hosts.err()
    assert "no restart" not in hosts.err()


def test_a_restart_imports_nothing_again(folder: Path, script: Callable[[str], str]) -> None:
    path = script("""
        was_there = "PreloadedModules" in str(sys.meta_path)
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        print("attempt", attempt, was_there, dist.get_world_size(), flush=True)
        if attempt == 0:
            os._exit(1)
    """)
    hosts = Hosts(folder, torchrun(path, restarts=1), options=("--preload", "torch")).start()
    assert hosts.wait() == [0], hosts.err()
    assert hosts.out().count("attempt 1 True 2") == 2


def test_a_rank_that_blames_its_peer_is_not_the_cause(folder: Path, script: Callable[[str], str]) -> None:
    # The culprit takes its time to go, as an interpreter with torch does; its peer's complaint arrives first.
    path = script("""
        import atexit, pathlib
        raised = pathlib.Path(sys.argv[0]).with_name("raised")
        if rank == 0:
            while not raised.exists():
                time.sleep(0.02)
            raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3145")
        atexit.register(time.sleep, 3)
        atexit.register(raised.touch)  # runs first, once the exception is in the error file
        raise ValueError("the cause")
    """)
    hosts = Hosts(folder, torchrun(path, restarts=0), options=NO_PRELOAD).start()
    assert hosts.wait() == [1]
    lines = hosts.err().strip().splitlines()
    assert "FAILED: rank 1 (" in lines[-1] and "ValueError: the cause" in lines[-1]
    assert not any("also: " in line for line in lines)


def test_nothing_of_an_attempt_lives_on_in_the_next(folder: Path, script: Callable[[str], str]) -> None:
    # Children of ranks that were killed or have ended: with a session or a process group of their own, orphans of
    # orphans, deaf to SIGTERM; one is a fork without an exec, as a data loader's worker is.
    path = script("""
        import pathlib, subprocess
        notes = pathlib.Path(sys.argv[0]).with_name("strays")
        notes.mkdir(exist_ok=True)
        def endure():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (notes / str(os.getpid())).touch()
            time.sleep(1000)
        def lives(pid):
            try:
                return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
            except FileNotFoundError:
                return False
        if attempt == 0:
            for leave in (os.setsid, lambda: os.setpgid(0, 0), lambda: None):
                if os.fork() == 0:
                    leave()
                    endure() if os.fork() == 0 else os._exit(0)
            if os.fork() == 0:
                os.setsid()
                endure()
            while len(list(notes.iterdir())) < 8:
                time.sleep(0.02)
            if rank == 1:
                sys.exit(1)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
        print("alive", [path.name for path in notes.iterdir() if lives(path.name)])
    """)
    hosts = Hosts(folder, torchrun(path, restarts=1), options=("--grace", "1", "--preload", "")).start()
    assert hosts.wait() == [0], hosts.err()
    assert hosts.out().count("alive []") == 2


def test_replacements_are_counted(folder: Path, script: Callable[[str], str]) -> None:
    options = (*NO_PRELOAD, "--replacements", "1")
    path = script("print('pid', os.getpid(), 'attempt', attempt, flush=True)\ntime.sleep(1000)")
    hosts = Hosts(folder, torchrun(path, restarts=0, nnodes=2), replicas=2, options=options).start()
    for attempt in range(2):
        until(lambda at=attempt: hosts.out(0).count(f"attempt {at}") == 2, "the ranks")
        until(lambda at=attempt: sum(e["kind"] == "ranks" for e in hosts.events()) == at + 1, "the report of it")
        hosts.lose(1)
        if attempt == 0:
            hosts.start(1)
    assert hosts.wait() == [1, -9]
    assert "was lost: its connection broke" in hosts.err(0).splitlines()[-1]
    for left in folder.glob("h*/"):  # of the hosts that were killed
        shutil.rmtree(left)
