# SPDX-License-Identifier: BSD-3-Clause
"""Elastic sizes: torchrun's ``--nnodes MIN:MAX``, with hosts that come and go; and spare hosts."""

from __future__ import annotations

import json
import platform
import signal
import textwrap
from pathlib import Path
from typing import Any

from torchx.specs import AppState

from tests.local.hosts import NO_PRELOAD, Hosts
from tests.local.place import LocalPlace
from tests.waits import WITHIN, until


class Job:
    """Hosts of a role of three, two ranks each, whose ranks say who they are and go on until ``finish``.

    Where there is a file ``fail``, rank 0 takes it away and exits with code 3.
    """

    def __init__(self, folder: Path, *torchrun: str, fewest: int = 1, options: tuple[str, ...] = ()) -> None:
        self.folder = folder
        program = folder / "prog.py"
        program.write_text(
            textwrap.dedent(f"""
                import os, sys, time
                names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
                         "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"]
                print("rank " + " ".join(os.environ[name] for name in names) + chr(10), end="", flush=True)
                os.chdir({str(folder)!r})
                while not os.path.exists("go"):
                    if os.environ["RANK"] == "0" and os.path.exists("fail"):
                        os.unlink("fail")
                        sys.exit(3)
                    time.sleep(0.05)
            """)
        )
        command = ["torchrun", "--nnodes", f"{fewest}:3", "--nproc-per-node", "2", *torchrun, str(program)]
        self.hosts = Hosts(folder, command, replicas=3, options=(*NO_PRELOAD, *options))

    def finish(self) -> list[int]:
        """Let the ranks end; exit codes of the hosts."""
        (self.folder / "go").touch()
        return self.hosts.wait()

    def attempt(self, replica: int, number: int) -> list[str]:
        """What the ranks of a replica have said in an attempt, as far as they have."""
        files = self.hosts.logs(replica).glob(f"attempt_{number}/*/stdout.log")
        return sorted(line.partition("rank ")[2] for path in files for line in path.read_text().splitlines())

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.hosts.events() if event["kind"] == kind]

    def resizes(self) -> list[tuple[int, int]]:
        return [(event["before"], event["now"]) for event in self.events("resize")]


def ranks(groups: int, group: int, restarts: int = 0) -> list[str]:
    """What the two ranks of a host say that is one of so many."""
    return [
        f"{2 * group + i} {2 * groups} {i} 2 {group} {groups} {2 * group + i} {2 * groups} {restarts}" for i in (0, 1)
    ]


def conf(join: int = 60, last_call: int = 1) -> tuple[str, str]:
    return "--rdzv-conf", f"join_timeout={join},last_call_timeout={last_call}"


def test_starts_with_the_fewest_after_the_last_call_and_grows(folder: Path) -> None:
    job = Job(folder, *conf(last_call=2), fewest=2)
    job.hosts.start(0, 2)
    until(lambda: job.attempt(2, 0) == ranks(2, 1), "the ranks of replica 2, the second of two hosts")
    until(lambda: job.attempt(0, 0) == ranks(2, 0), "those of replica 0")
    assert "[monarch] hosts 2/3 (elastic, 2 to 3) (" in job.hosts.err()
    assert [event["count"] for event in job.events("hosts")] == [2]
    job.hosts.start(1)
    # Membership changes do not count as restarts, as in torchrun.
    for replica in range(3):
        until(lambda r=replica: job.attempt(r, 1) == ranks(3, r), f"the new ranks of replica {replica}")
    assert job.finish() == [0, 0, 0]
    assert "size changed from 2 to 3 hosts: replica 1 came" in job.hosts.err()
    assert job.resizes() == [(2, 3)]
    # Another start of the whole job by the backend keeps the logs of this one.
    again = Job(folder, *conf(last_call=600), fewest=2)
    again.hosts.environ["MONARCH_RESTART"] = "1"
    assert again.hosts.start().wait() == [0, 0, 0]
    assert {path.name for path in job.hosts.logs(0).glob("attempt_*")} == {"attempt_0", "attempt_1", "attempt_2"}


def test_all_hosts_do_not_wait_and_a_lost_one_is_not_the_end(folder: Path) -> None:
    job = Job(folder, *conf(last_call=600), "--max-restarts", "1")
    job.hosts.start()
    until(lambda: len(job.attempt(2, 0)) == 2 and job.events("output"), "the ranks")
    job.hosts.lose(1)
    for replica, group in ((0, 0), (2, 1)):
        until(lambda r=replica, g=group: job.attempt(r, 1) == ranks(2, g, restarts=1), f"ranks of {replica}")
    assert job.resizes() == [(3, 2)]
    (folder / "fail").touch()  # the budget has not been spent
    until(lambda: job.attempt(0, 2) == ranks(2, 0, restarts=2), "the restart")
    assert job.finish() == [0, -9, 0]
    assert "restart 1 of 1 after: rank 0" in job.hosts.err()


def test_fewer_than_the_fewest_fail(folder: Path) -> None:
    job = Job(folder, *conf(last_call=600), fewest=2)
    job.hosts.start()
    until(lambda: job.events("output"), "the ranks")
    job.hosts.lose(1)
    until(lambda: job.resizes() == [(3, 2)], "the smaller size")
    job.hosts.lose(2)
    assert job.hosts.wait() == [1, -9, -9]
    last = job.hosts.err().splitlines()[-1]
    assert "FAILED: host 2 (" in last and "was lost: its connection broke" in last
    assert "; 1 of at least 2 hosts left, and replica 1, 2 will not be replaced (" in last


def test_the_fewest_have_the_join_timeout(folder: Path) -> None:
    job = Job(folder, *conf(join=1), fewest=2)
    job.hosts.start(0)
    assert job.hosts.wait() == [1]
    options = "--host-timeout, or join_timeout of --rdzv-conf"
    said = f"1 of at least 2 hosts arrived within 1 s ({options}): replica 1, 2 did not"
    assert said in job.hosts.err().splitlines()[-1]


def test_a_replacement_that_comes_in_the_last_call_keeps_the_size(folder: Path) -> None:
    job = Job(folder, *conf(last_call=60), options=("--replacements", "1"))
    job.hosts.start()
    for attempt in range(2):  # no replacement is spent where the fewest are left
        until(lambda n=attempt + 1: len(job.events("ranks")) == n, "the ranks")
        job.hosts.lose(1)
        job.hosts.start(1)
    until(lambda: job.attempt(2, 2) == ranks(3, 2, restarts=2), "the last attempt")
    assert job.finish() == [0, 0, 0]
    assert job.resizes() == [] and job.events("replacement") == []


def test_below_the_fewest_waits_for_a_replacement(folder: Path) -> None:
    job = Job(folder, *conf(), fewest=2, options=("--replacements", "1"))
    job.hosts.start(0, 1)
    until(lambda: job.events("ranks"), "the ranks")
    job.hosts.lose(1)
    until(lambda: job.events("replacement"), "the wish for a replacement")
    job.hosts.start(1)
    until(lambda: job.attempt(0, 1) == ranks(2, 0, restarts=1), "the next attempt")
    assert job.finish() == [0, 0]


def test_a_host_that_is_told_to_stop_leaves_alone(folder: Path) -> None:
    job = Job(folder, *conf(last_call=600))
    job.hosts.start()
    until(lambda: job.events("output"), "the ranks")
    job.hosts.processes[2].terminate()
    until(lambda: job.attempt(1, 1) == ranks(2, 1, restarts=1), "the smaller size")
    assert job.hosts.processes[2].wait(WITHIN) == 143
    for process in job.hosts.processes.values():  # as a backend stops a job
        process.send_signal(signal.SIGTERM)
    assert job.hosts.wait() == [143, 143, 143]
    assert "STOPPED: preempted or cancelled: host 0" in job.hosts.err().splitlines()[-1]


def test_a_host_that_cannot_start_does_not_disturb_those_that_run(folder: Path) -> None:
    job = Job(folder, *conf(), fewest=2)
    job.hosts.start(0, 1)
    until(lambda: job.events("output"), "the ranks")
    job.hosts.environ["PYTHON_EXEC"] = "/no/such/python"
    job.hosts.start(2)
    assert job.hosts.processes[2].wait(WITHIN) == 1
    assert "cannot start the Python interpreter '/no/such/python'" in job.hosts.err(2)
    assert job.finish() == [0, 0, 1]
    assert len(job.events("ranks")) == 1


def test_a_replaced_replica_0_gathers_those_that_are_left(folder: Path) -> None:
    job = Job(folder, *conf(last_call=2), fewest=2, options=("--replacements", "1"))
    job.hosts.start(0, 2)
    until(lambda: job.events("output"), "the ranks")
    job.hosts.lose(0)
    job.hosts.environ["MONARCH_RESTART"] = "1"
    job.hosts.start(0)
    # The numbers of log folders leave room for what the first start of replica 0 may have had.
    for replica, group in ((0, 0), (2, 1)):
        until(lambda r=replica, g=group: job.attempt(r, 3) == ranks(2, g, restarts=1), f"ranks of {replica}")
    assert job.finish() == [0, 0]


def test_ranks_that_miss_a_lost_host_are_not_to_blame(folder: Path) -> None:
    # They fail of its loss while the controller hears of it, without a budget for failures.
    program = folder / "ddp.py"
    program.write_text(
        textwrap.dedent("""
            import os, time
            import torch, torch.distributed as dist
            dist.init_process_group("gloo")
            for step in range(10**6):
                total = torch.ones(1)
                dist.all_reduce(total)
                if step == 1:
                    print("sum", int(total), flush=True)
                if total == 1 and step > 9:
                    break
            dist.destroy_process_group()
        """)
    )
    command = ["torchrun", "--nnodes", "1:2", "--nproc-per-node", "1", str(program)]
    hosts = Hosts(folder, command, replicas=2, options=("--grace", "5")).start()
    until(lambda: all("sum 2" in hosts.out(replica) for replica in range(2)), "the sum of two")
    hosts.processes[1].kill()
    assert hosts.wait() == [0, -9], hosts.err()
    assert "sum 1" in hosts.out(0)


FAILS = """
import os, time
def told(word):
    return os.path.exists(os.path.join({folder!r}, "told-" + word))
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("attempt", attempt, "rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
while attempt == 0 and not told("fail"):
    time.sleep(0.05)
if attempt == 0 and os.environ["GROUP_RANK"] == "1":
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
while not told("end"):
    time.sleep(0.05)
"""


def test_the_loss_of_a_spare_harms_nothing_and_a_bad_host_makes_way_for_the_other(place: LocalPlace) -> None:
    role = place.torchrun(
        *("--max-restarts", "1", place.program(FAILS.format(folder=str(place.folder)))),
        nproc=1,
        metadata={"monarch": {"spares": 2}},
    )
    handle = place.run(role, exclude_after=1)
    place.until(lambda: place.log(handle).count("attempt 0") == 2, "the ranks", handle)
    place.until(lambda: "spare: host 2 (" in place.log(handle), "the spares", handle)
    place.lose(handle, 2)
    place.until(lambda: "it ran no ranks" in place.log(handle), "the loss of the spare", handle)
    place.tell("fail")
    place.until(lambda: "attempt 1 rank 1 of 2" in place.log(handle, replicas=4), "the spare's rank", handle)
    assert "attempt 1 rank 1 of 2" in "".join(place.lines(handle, 3))
    status = json.loads(place.torchx("monarch", "status", "--json", handle))
    assert (status["hosts"], status["attempt"], status["spares"], status["state"]) == (2, 2, [], "RUNNING")
    (excluded,) = status["excluded"]
    assert "(replica 1) is excluded after 1 failure within 1 h, the last: rank 1" in excluded["message"]
    page = place.folder / "job.html"
    place.torchx("monarch", "report", handle, "-o", str(page))
    assert "(replica 1) is excluded after 1 failure" in page.read_text()
    place.tell("end")
    ended = place.wait(handle, AppState.SUCCEEDED)
    assert ended.num_restarts == 1
    states = [replica.state for replica in ended.roles[0].replicas]
    assert states == [AppState.SUCCEEDED, AppState.SUCCEEDED, AppState.FAILED, AppState.SUCCEEDED]
    (here,) = json.loads(place.torchx("monarch", "nodes", "--json"))
    assert (here["node"], here["jobs"], here["faults"]) == (platform.node(), 1, {"failed_alone": 1})
    place.torchx("delete", handle)  # what the job has met is known without it
    assert f"{here['node']} 1 1 in 1 job" in " ".join(place.torchx("monarch", "nodes").split())
