# SPDX-License-Identifier: BSD-3-Clause
"""Samples of ranks, as a client gets them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.local.hosts import Hosts, torchrun
from tests.local.live import Live
from tests.waits import WITHIN, until
from torchx_monarch.client.rank_queries import ask_events, ask_samples
from torchx_monarch.exceptions import RefusedError, UnreachableError
from torchx_monarch.host.ranks.rank_process import Rank
from torchx_monarch.host.ranks.rank_samples import take_samples
from torchx_monarch.insight.group_calls import GroupCalls
from torchx_monarch.insight.rank_sample import RankSample, RankSamples
from torchx_monarch.insight.timeline import build
from torchx_monarch.model.role_spec import RoleSpec, WorkloadKind
from torchx_monarch.system.console import WriterThread

PROGRAM = """
    import subprocess
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    child = subprocess.Popen(["sleep", "100"]) if rank == 1 else None
    for _ in range(5):
        dist.all_reduce(torch.ones(7))
    while time.process_time() < 0.1:
        pass
    print(f"loss \\x1b[31m{rank}", "x" * 500, flush=True)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank != 3:
        dist.all_reduce(torch.ones(9))
    time.sleep(1000)
"""


def wait_for(hosts: Hosts, holds: Callable[[dict[int, RankSample]], bool]) -> dict[int, RankSample]:
    samples = dict[int, RankSample]()

    def are_there() -> bool:
        with contextlib.suppress(RefusedError, UnreachableError):  # replica 0 does not listen yet, or waits for hosts
            found, missing = ask_samples(hosts.client)
            assert not missing
            samples.clear()
            samples.update({sample.rank: sample for sample in found.ranks})
        return holds(samples)

    until(are_there, lambda: f"these samples to be as expected: {samples}", every=0.05)
    return samples


def test_a_host_reads_proc_once_and_not_on_its_event_loop(tmp_path: Path) -> None:
    """The threads of a rank can be hundreds. Meanwhile the loop handles heartbeats, exits and output."""
    opened: list[tuple[str, bool]] = []
    is_over = False

    def note(event: str, args: tuple[object, ...]) -> None:
        if event == "open" and not is_over and str(args[0]).startswith("/proc/"):
            opened.append((str(args[0]), threading.current_thread() is threading.main_thread()))

    async def main() -> RankSamples:
        ranks = [Rank(number, number, lambda: None) for number in range(2)]
        for rank in ranks:
            rank.begin(os.posix_spawnp("sleep", ["sleep", "300"], os.environ, setsid=True))
            rank.release()
        opened.clear()
        samples = await take_samples(ranks, 0, 0, "here", "app", WriterThread())
        for rank in ranks:
            rank.kill(signal.SIGKILL)
            await rank.drain()
        return samples

    sys.addaudithook(note)
    try:
        samples = asyncio.run(main())
        assert [path for path, on_loop in opened if on_loop or "/task/" in path] == []
        assert [path for path, _ in opened].count("/proc/1/stat") == 1
        states = [sample.state for sample in samples.ranks]
        assert len(states) == 2 and {*states} <= {"running", "uninterruptible"}  # as while a slow disk has "sleep"
    finally:
        is_over = True


def test_what_ranks_of_two_hosts_do(folder: Path, script: Callable[[str], str]) -> None:
    began = time.time()
    options, no_file = ("--grace", "1"), {"MONARCH_EVENTS": ""}  # as on Kubernetes, where no supervisor has one
    hosts = Hosts(folder, torchrun(script(PROGRAM), nnodes=2), 2, options, no_file).start()
    samples = wait_for(
        hosts,
        lambda found: (
            len(found) == 4
            and found[2].state == "stopped"
            and found[2].collectives is None  # a stopped process does not answer; it may have been asked before
            # On a busy machine a rank may answer too late.
            and [found[rank].collectives for rank in (0, 1, 3)] == [6, 6, 5]
            and all(sample.last_line for sample in found.values())
        ),
    )
    assert [(sample.rank, sample.local_rank, sample.replica, sample.attempt) for sample in samples.values()] == [
        (0, 0, 0, 0),
        (1, 1, 0, 0),
        (2, 0, 1, 0),
        (3, 1, 1, 0),
    ]
    assert {rank: sample.state for rank, sample in samples.items()} == {
        0: "running",
        1: "running",
        2: "stopped",
        3: "running",
    }
    assert all(sample.cpu_seconds > 0 and sample.rss_bytes > 1 << 20 for sample in samples.values())
    assert all(
        sample.last_output is not None and began < sample.last_output <= sample.time for sample in samples.values()
    )
    assert samples[0].last_line.startswith("loss \\x1b[31m0 xxx") and len(samples[0].last_line) == 200
    calls: dict[int, GroupCalls] = {}

    def are_known() -> bool:  # on a busy machine a rank may answer too late
        calls.clear()
        calls.update((rank, found) for found in ask_samples(hosts.client)[0].calls for rank in found.ranks)
        return {0, 3} <= calls.keys()

    until(are_known, "the calls of ranks 0 and 3")
    assert calls[0].members == calls[3].members == "0-3" and calls[0].waiting == (6,) and not calls[3].waiting
    assert calls[0].enqueued == (6,) * len(calls[0].ranks) and calls[0].waited[0] > 0
    happened = ask_events(hosts.client.target, WITHIN)
    drawn = build(happened, [RoleSpec("trainer", 2, workload=WorkloadKind.RANKS)], end=time.time())
    assert [event["kind"] for event in happened[:3]] == ["job_started", "hosts", "ranks"]
    assert drawn.roles[0].phase.name == "running" and [rank.number for rank in drawn.last_ranks()] == [0, 1, 2, 3]
    hosts.stop()


def test_a_rank_that_has_ended_and_the_runs_of_an_allocation(folder: Path, script: Callable[[str], str]) -> None:
    path = script("""
        if rank == 0:
            print("done")
        else:
            time.sleep(1000)
    """)
    hosts = Live(folder, torchrun(path)).ready()
    assert ask_samples(hosts.client) == (RankSamples(), {})
    running = hosts.job.run_spmd_async(workspace=None)
    samples = wait_for(hosts, lambda found: len(found) == 2 and found[0].state == "ended")
    assert samples[0].last_line == "done" and samples[0].cpu_seconds == 0
    assert samples[1].state == "running" and samples[1].last_output is None and samples[1].last_line == ""
    running.cancel()
    hosts.stop()


@pytest.mark.parametrize("how", ["fresh", "fork"])
def test_a_job_that_fails_again_and_again_at_one_step(folder: Path, script: Callable[[str], str], how: str) -> None:
    path = script("""
        import torchx_monarch
        if rank == 0:
            print("begins", flush=True)
            step = [3, 5, 5, 5][attempt]
            torchx_monarch.progress(step - 1, 10)
            torchx_monarch.progress(step, 10, checkpoint=2, loss=0.5)
            sys.exit(9)
        time.sleep(1000)
    """)
    command = torchrun(path, restarts=8)
    hosts = Hosts(
        folder, command, options=("--grace", "1", "--ranks", how, "--preload", "json", "--same-step-limit", "2")
    ).start()
    assert hosts.wait() == [9]
    assert hosts.out().count("begins") == 3
    assert "no restart: 2 failures in a row at step 5, without progress (same_step_limit)" in hosts.err()
