# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A job goes on when its leader is lost: another host takes over, with the ranks restarted once."""

from __future__ import annotations

import json
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.local.hosts import Hosts
from tests.waits import WITHIN

Eventually = Callable[..., object]


class Job:
    """Hosts of one rank each. A rank writes a line for its attempt and goes on until there is a file ``go``.

    Where there is a file ``fail``, rank 0 removes it and exits with code 3.
    """

    def __init__(
        self, folder: Path, nnodes: str, *options: str, replicas: int = 3, restarts: int = 0, last_call: int = 60
    ) -> None:
        self.folder = folder
        program = folder / "prog.py"
        program.write_text(
            textwrap.dedent(f"""
                import os, sys, time
                os.chdir({str(folder)!r})
                names = ["RANK", "WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT"]
                print("rank " + " ".join(os.environ[name] for name in names) + chr(10), end="", flush=True)
                while not os.path.exists("go"):
                    if os.environ["RANK"] == "0" and os.path.exists("fail"):
                        os.unlink("fail")
                        sys.exit(3)
                    time.sleep(0.05)
            """)
        )
        conf = ("--rdzv-conf", f"join_timeout=60,last_call_timeout={last_call}")
        command = ["torchrun", "--nnodes", nnodes, *conf, "--max-restarts", str(restarts), str(program)]
        given = ("--grace", "5", "--preload", "", "--hands-over", "1", *options)
        self.hosts = Hosts(folder, command, replicas=replicas, options=given)

    def said(self, replica: int, attempt: int) -> list[str]:
        """What the rank of a replica has printed in an attempt."""
        files = self.hosts.logs(replica).glob(f"attempt_{attempt}/*/stdout.log")
        return [line.partition("rank ")[2] for path in files for line in path.read_text().splitlines()]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.hosts.events() if event["kind"] == kind]

    def kill(self, replica: int) -> None:
        self.hosts.lose(replica)

    def finish(self) -> list[int]:
        """Let the ranks end; return the exit codes of the hosts."""
        (self.folder / "go").touch()
        return self.hosts.wait()

    def error(self, replica: int) -> Any:
        return json.loads((self.hosts.logs(replica) / "error.json").read_text())


def test_an_elastic_job_goes_on_under_the_next_host_and_the_one_after_it(folder: Path, eventually: Eventually) -> None:
    job = Job(folder, "1:3", restarts=2)
    job.hosts.start()
    eventually(lambda: job.said(2, 0) == ["2 3 2 0"], "the first attempt")
    (folder / "fail").touch()
    eventually(lambda: job.said(2, 1) == ["2 3 2 1"], "the attempt after a failure of a rank")
    job.kill(0)
    eventually(lambda: job.said(1, 2) == ["0 2 0 2"] and job.said(2, 2) == ["1 2 1 2"], "the attempt under host 1")
    job.kill(1)
    eventually(lambda: job.said(2, 3) == ["0 1 0 3"], "the attempt under host 2")
    # One of the two restarts is used up: the new leader goes on to count.
    (folder / "fail").touch()
    eventually(lambda: job.said(2, 4) == ["0 1 0 4"], "the last restart")
    (folder / "fail").touch()
    assert job.hosts.wait()[2] == 3
    assert [(event["replica"], event["replaces"], event["term"]) for event in job.events("take_over")] == [
        (1, 0, 1),
        (2, 1, 2),
    ]
    assert not list(folder.glob("r.sock*"))


def test_a_spare_host_makes_up_for_the_leader(folder: Path, eventually: Eventually) -> None:
    job = Job(folder, "2", "--spares", "1")
    job.hosts.start()
    eventually(lambda: job.said(0, 0) == ["0 2 0 0"] and job.said(1, 0) == ["1 2 1 0"], "the first attempt")
    eventually(lambda: job.events("spares"), "the spare host")
    job.kill(0)
    eventually(lambda: job.said(1, 1) == ["0 2 0 1"] and job.said(2, 1) == ["1 2 1 1"], "the attempt under host 1")
    assert job.finish() == [-signal.SIGKILL, 0, 0]
    assert not job.said(1, 2)


def test_a_stopped_leader_that_goes_on_ends_itself(folder: Path, eventually: Eventually) -> None:
    # The other two are to answer within it on a busy machine.
    job = Job(folder, "1:3", "--lease", "6")
    job.hosts.start()
    eventually(lambda: job.said(2, 0), "the first attempt")
    job.hosts.processes[0].send_signal(signal.SIGSTOP)
    try:
        eventually(lambda: job.said(1, 1) == ["0 2 0 1"] and job.said(2, 1) == ["1 2 1 1"], "the attempt under host 1")
    finally:
        job.hosts.processes[0].send_signal(signal.SIGCONT)
    assert job.hosts.processes[0].wait(WITHIN) == 1
    assert "did not run for" in job.hosts.err(0)
    assert (folder / "r.sock").exists()  # clients find the new leader there
    assert job.finish() == [1, 0, 0]
    assert not job.said(1, 2)


def test_a_job_that_needs_all_hosts_ends_with_replica_0(folder: Path, eventually: Eventually) -> None:
    job = Job(folder, "2:3", last_call=1)
    job.hosts.start(0, 1)
    eventually(lambda: job.said(1, 0), "the first attempt")
    job.kill(0)
    assert job.hosts.wait()[1] == 1
    assert not job.events("take_over")
    assert job.error(1)["message"]["message"].endswith("lost replica 0")


def test_a_preempted_leader_hands_over_and_clients_find_the_next_one(folder: Path, eventually: Eventually) -> None:
    job = Job(folder, "1:3")
    job.hosts.start()
    eventually(lambda: job.said(2, 0) == ["2 3 2 0"], "the first attempt")
    job.hosts.processes[0].send_signal(signal.SIGTERM)
    eventually(lambda: job.said(1, 1) == ["0 2 0 1"] and job.said(2, 1) == ["1 2 1 1"], "the attempt under host 1")
    assert job.hosts.processes[0].wait(WITHIN) == 128 + signal.SIGTERM
    assert (folder / "r.sock").exists()  # clients find the new leader there
    assert [event["replica"] for event in job.events("preempted")] == [0]
    assert job.finish() == [128 + signal.SIGTERM, 0, 0]
    assert [event["code"] for event in job.events("result")] == [0]
