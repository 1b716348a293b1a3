# SPDX-License-Identifier: BSD-3-Clause
"""Ranks that wait in a collective for one that does not call it: which one is named, and what is done about it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.conformance.differences import Difference, differs
from tests.local.hosts import NO_PRELOAD, Hosts, torchrun
from tests.local.live import Live
from tests.waits import until

HANG_AFTER = 3.0
"""Seconds; a busy machine may keep a rank of a healthy program from running for nearly as long."""

PROGRAM = """
import ctypes, os, signal, sys, time
import torch, torch.distributed as dist
rank, how, hang_after = int(os.environ["RANK"]), sys.argv[1], float(sys.argv[2])

def all_reduce(group=None):
    dist.all_reduce(torch.ones(7), group=group)

dist.init_process_group("gloo")
halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
for _ in range(3):
    all_reduce()
if how == "operations":
    calls = [all_reduce, lambda: dist.broadcast(torch.ones(7), 0)]
    for call in reversed(calls) if rank == 3 else calls:
        call()
elif how == "chain":
    if rank == 3:
        time.sleep(1000)
    elif rank == 2:
        all_reduce(halves[1])
    all_reduce()
elif how == "gil":
    if rank == 3:
        ctypes.PyDLL(None).usleep(1_000_000_000)
    all_reduce()
elif how == "stopped":
    if rank == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    all_reduce()
elif how == "uneven":
    for step in range(18):  # together longer than it takes to be a hang
        time.sleep((rank + step) % 4 * 0.05 * hang_after)
        all_reduce(halves[rank // 2])
        all_reduce()
dist.destroy_process_group()
"""
"""Four ranks that hang in various ways; ``uneven`` only seems to."""

HANGS = {
    "chain": "rank 3 has not called gloo:all_reduce, number ",
    "operations": "rank 3 has called gloo:broadcast [7] as number 4 of group 0, the others gloo:all_reduce [7]; ",
    "gil": "rank 3 does not answer, and has not called gloo:all_reduce, number 4 of group 0, in which ranks 0-2",
    "stopped": "rank 3 does not answer, and has not called gloo:all_reduce, number 4 of group 0, in which ranks 0-2",
}
"""What is said of the programs that hang."""


def hangs(hosts: Hosts) -> list[dict[str, Any]]:
    return [event for event in hosts.events() if event["kind"] == "hang"]


def test_runs_that_hang_fail_with_the_rank_that_others_wait_for(live: Callable[..., Live], tmp_path: Path) -> None:
    path = tmp_path / "hang.py"
    path.write_text(PROGRAM)
    options = ("--grace", "1", "--hang-after", str(HANG_AFTER), "--on-hang", "fail")
    hosts = live(*torchrun(str(path), nproc=4, restarts=1), idle_timeout=300, options=options)
    for how, why in HANGS.items():
        result = hosts.run(str(path), how, str(HANG_AFTER))
        assert why in result.reason and result.exit_code == 1, how
        assert result.reason.startswith("hang: rank 3 ") and "(local rank 3 on " in result.reason
        assert f": is at {path}:" in result.reason or (how == "stopped" and ": stopped (SIGSTOP) (" in result.reason)
    line = "no restart: the ranks hung (on_hang=fail)"
    until(lambda: hosts.err().count(line) == len(HANGS), "the last line")
    count = len(hangs(hosts))
    assert (hosts.run(str(path), "uneven", str(HANG_AFTER)).exit_code, len(hangs(hosts))) == (0, count)
    hosts.end()
    *_, stopped = hangs(hosts)
    assert (stopped["ranks"], stopped["waiting"], stopped["group"], stopped["number"]) == ("3", "0-2", "0", 4)
    assert (stopped["operation"], stopped["fault"]) == ("gloo:all_reduce", "silent")
    assert stopped["place"].endswith(": stopped (SIGSTOP)")
    stacks = (hosts.logs(0) / "run_1" / "attempt_0" / "stacks.txt").read_text()
    assert "while ranks hang" in stacks and "before SIGTERM" in stacks and "hang.py" in stacks


@differs(Difference.KERNEL_TIMEOUT)
def test_a_rank_that_waits_inside_the_kernel_ends_the_job_after_the_timeout_of_torchs_variable(
    folder: Path, script: Callable[[str], str]
) -> None:
    path = script("""
        import ctypes
        if rank == 1:
            ctypes.CDLL(None).vfork()  # the parent waits, in state D, for the end of the child
        time.sleep(1000)
    """)
    environ = {"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "1"}
    hosts = Hosts(folder, torchrun(path), options=NO_PRELOAD, environ=environ).start()
    assert hosts.wait() == [1]
    what = r"rank 1 has waited inside the kernel for \d+ s; rank 1 \(host 0, pid \d+\): has not answered"
    assert re.search(rf"FAILED: hang: {what}; it is uninterruptible, inside the kernel", hosts.err()), hosts.err()
    [hang] = hangs(hosts)
    assert (hang["fault"], hang["ranks"]) == ("kernel", "1")


def test_a_hang_is_observed_until_it_is_over_and_ranks_are_restarted_if_asked_for(
    folder: Path, script: Callable[[str], str]
) -> None:
    path = script("""
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        if rank == 0:
            dist.recv(torch.ones(3), 1)
        else:
            while not os.path.exists(os.environ["SEND"]):
                time.sleep(0.01)
            dist.send(torch.ones(3), 0)
        if rank == 1 and attempt == 0:
            while not os.path.exists(os.environ["GO"]):
                time.sleep(0.01)
        dist.all_reduce(torch.ones(3))
        print("done", flush=True)
        dist.destroy_process_group()
    """)
    options = ("--grace", "5", "--hang-after", "1")
    files = {"GO": str(folder / "go"), "SEND": str(folder / "send")}
    observed = Hosts(folder, torchrun(path), options=options, environ=files).start()
    quiet = "no rank has called a collective or printed anything for "
    until(lambda: quiet in observed.err(), "the line about ranks that wait to receive")
    (said,) = [line for line in observed.err().splitlines() if quiet in line]
    assert "rank 0 (host 0, pid " in said and f"is at {path}:7 in <module>; rank 1" in said
    assert not hangs(observed)
    (folder / "send").touch()

    def is_seen() -> bool:
        assert observed.processes[0].poll() is None, observed.err()
        return bool(hangs(observed))

    until(is_seen, "the hang")
    (folder / "go").touch()
    assert observed.wait() == [0]
    assert "hang: rank 1 has not called gloo:all_reduce, number 1 of group 0" in observed.err()
    hang = hangs(observed)[0]
    assert (hang["ranks"], hang["waiting"], hang["fault"]) == ("1", "0", "missing")
    assert "is at /" in hang["place"] and hang["place"].endswith("in <module>")

    (folder / "go").unlink()
    (folder / "events.jsonl").unlink()
    # The second attempt is to be no hang on a busy machine either.
    more = ("--grace", "5", "--hang-after", "5", "--on-hang", "restart", "--retry-on", "77")
    restarted = Hosts(folder, torchrun(path, restarts=1), options=more, environ=files).start()
    assert restarted.wait() == [0], restarted.err()
    assert restarted.out().count("done") == 2 + 2 and len(hangs(restarted)) == 1
    kinds = [event["kind"] for event in restarted.events()]
    assert kinds.index("hang") < kinds.index("failure") < kinds.index("rank_restart")
    assert "restart 1 of 1 after: hang: rank 1 has not called gloo:all_reduce" in restarted.err()
