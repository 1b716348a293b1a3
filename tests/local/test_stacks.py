# SPDX-License-Identifier: BSD-3-Clause
"""The stacks of ranks: when a client asks for them, and before a host stops its ranks."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.local.hosts import NO_PRELOAD, Hosts, torchrun
from tests.local.live import Live
from tests.waits import until
from torchx_monarch.client.connection import Connection, Target
from torchx_monarch.client.rank_queries import ask_profiles, ask_stacks
from torchx_monarch.exceptions import RefusedError, UnreachableError
from torchx_monarch.host.ranks.rank_main import STACKS_SIGNAL
from torchx_monarch.insight.stacks import ProcessStacks
from torchx_monarch.transport.address import Address

READY = 'ready = lambda: print("ready", flush=True)'
"""The first line of a program that says when it is where it shall be found."""

SLEEPS = f"{READY}\nready()\ntime.sleep(1000)\n"
"""A program that says so and sleeps."""


def wait_for(hosts: Hosts, text: str, count: int) -> None:
    def is_there() -> bool:
        assert all(process.poll() is None for process in hosts.processes.values()), hosts.err()
        return sum(hosts.out(replica).count(text) for replica in hosts.processes) >= count

    until(is_there, f"{count} times {text!r}")


def stacks_of(hosts: Hosts) -> dict[int, ProcessStacks]:
    """The stacks of the ranks' own processes, by rank."""
    stacks, missing = ask_stacks(hosts.client)
    assert not missing
    return {process.rank: process for process in stacks if not process.child}


def samplers(hosts: Hosts, replica: int = 0) -> list[psutil.Process]:
    """The processes of py-spy that a host has started."""
    children = psutil.Process(hosts.processes[replica].pid).children()
    return [child for child in children if "py-spy" in child.name()]


def functions(stacks: ProcessStacks, thread: int = 0) -> list[str]:
    return [frame.function for frame in stacks.threads[thread].frames] if stacks.threads else []


def test_each_rank_is_named_with_what_it_does(folder: Path, script: Callable[[str], str]) -> None:
    path = script(f"""
        {READY}
        import ctypes, threading
        def sleeps():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            ready()
            time.sleep(1000)
        def holds_the_gil():
            ready()
            while True:
                ctypes.PyDLL(None).usleep(100_000_000)
        def loads():
            from torch.utils.data import DataLoader, Dataset
            class Stuck(Dataset):
                def __len__(self):
                    return 8
                def __getitem__(self, index):
                    ready()
                    time.sleep(1000)
            next(iter(DataLoader(Stuck(), num_workers=1)))
        def is_stopped():
            ready()
            os.kill(os.getpid(), signal.SIGSTOP)
        [sleeps, holds_the_gil, is_stopped, loads][rank]()
    """)
    hosts = Hosts(folder, torchrun(path, nnodes=2), replicas=2, options=("--grace", "1")).start()
    wait_for(hosts, "ready", 4)
    for pid in [child.pid for child in psutil.Process(hosts.processes[1].pid).children(recursive=True)]:
        if psutil.pid_exists(pid) and "rank 2" in " ".join(psutil.Process(pid).cmdline()):
            while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
                time.sleep(0.01)
    stacks, missing = ask_stacks(hosts.client)
    ranks = {process.rank: process for process in stacks if not process.child}
    workers = [process for process in stacks if process.child]
    assert not missing
    assert functions(ranks[0])[:2] == ["sleeps", "<module>"] and "holds_the_gil" in functions(ranks[1])
    assert ranks[2].problem == "stopped (SIGSTOP)" and not ranks[2].threads
    assert "loads" in functions(ranks[3])
    assert [worker.rank for worker in workers] == [3] and "__getitem__" in functions(workers[0])
    only, _ = ask_stacks(hosts.client, rank=0)
    assert [stacks.rank for stacks in only] == [0]
    hosts.stop()
    written = (hosts.logs(0) / "attempt_0" / "stacks.txt").read_text()
    assert "sleeps" in written.partition("before SIGKILL")[2]
    written = (hosts.logs(1) / "attempt_0" / "stacks.txt").read_text()
    assert "before SIGTERM" in written and "rank 2 (host 1, pid" in written and "stopped (SIGSTOP)" in written
    assert "before SIGKILL" not in written  # a stopped process gets SIGCONT, and so ends by SIGTERM
    assert "__getitem__" in written


@pytest.mark.parametrize("how", ["--ranks=fresh", "--ranks=fork"])
def test_the_survivors_stacks_are_kept_before_each_restart(
    folder: Path, script: Callable[[str], str], how: str
) -> None:
    path = script(f"""
        {READY}
        def survives():
            ready()
            time.sleep(1000)
        if rank != 2:
            survives()
        while len(open(os.environ["SEEN"]).read().split()) < 1:
            time.sleep(0.01)
        sys.exit(3)
    """)
    seen = folder / "seen"
    seen.touch()
    options = (*NO_PRELOAD, *how.split("="))
    hosts = Hosts(folder, torchrun(path, nnodes=2, restarts=1), 2, options, {"SEEN": str(seen)}).start()
    wait_for(hosts, "ready", 3)
    tops = lambda: [functions(stack)[:1] for stack in stacks_of(hosts).values()]  # noqa: E731
    until(lambda: tops().count(["survives"]) == 3, "the survivors to have said so", every=0.1)  # type: ignore[no-untyped-call]
    seen.write_text("x")
    assert hosts.wait() == [3, 3], hosts.err()
    for attempt in (0, 1):
        texts = [(hosts.logs(host) / f"attempt_{attempt}" / "stacks.txt") for host in (0, 1)]
        if attempt == 0:
            assert "ranks 0-1: main thread" in texts[0].read_text()
            assert "rank 3 (host 1, pid " in texts[1].read_text()
            assert all("in survives" in text.read_text() for text in texts)


def test_nothing_of_it_reaches_the_programs_files(folder: Path, script: Callable[[str], str]) -> None:
    # It closes all descriptors, opens others, blocks the signal, or writes what it likes where stacks are read.
    path = script(f"""
        {READY}
        import subprocess
        top = max(int(n) for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{{n}}"))
        def garbage():
            for _ in range(100):
                try:
                    os.write(top, b"Thread 0x1 (most recent call first):\\n" * 1000)
                except OSError:
                    break
            os.lseek(top, 1 << 40, 0)
        def closes():
            os.closerange(3, 2000)
            for n in range(64):
                os.open(f"{{os.environ['OPENED']}}{{n}}", os.O_CREAT | os.O_WRONLY)
        def blocks():
            signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
        def executes():
            child = subprocess.Popen(["sleep", "100"])
            while ") S " not in open(f"/proc/{{child.pid}}/stat").read():
                time.sleep(0.01)
        [garbage, closes, blocks, executes][rank]()
        ready()
        time.sleep(1000)
    """)
    hosts = Hosts(folder, torchrun(path, nproc=4), options=NO_PRELOAD, environ={"OPENED": str(folder / "o")}).start()
    wait_for(hosts, "ready", 4)
    for asked in ([None], range(4)):
        answers = [ask_stacks(hosts.client, rank) for rank in asked]
        stacks = [process for found, _ in answers for process in found]
        ranks = {process.rank: process for process in stacks if not process.child}
        assert not any(missing for _, missing in answers)
        assert functions(ranks[0]) == ["<module>"] and not ranks[0].problem
        assert "no stacks: not a Python program" in ranks[1].problem
        assert ranks[2].problem == "blocks the signal that asks for stacks"
        assert [(process.child, process.problem) for process in stacks if process.rank == 3 and process.child] == [
            ("sleep", "no stacks: not a fork of the rank; it is sleeping")
        ]
        assert functions(ranks[3]) == ["<module>"]
    assert all(not (folder / f"o{n}").read_text() for n in range(64))
    hosts.stop()
    assert "Thread" not in hosts.err() and "most recent call" not in hosts.err() + hosts.out()


def test_a_program_that_is_not_python_is_not_signalled(folder: Path) -> None:
    waits = "sleep 1000 & until grep -q sleep /proc/$!/comm; do :; done; echo ready; wait"
    command = [*["torchrun", "--nproc-per-node", "1", "--no-python", "--tee", "3", "sh", "-c"], waits]
    hosts = Hosts(folder, command, options=NO_PRELOAD).start()
    wait_for(hosts, "ready", 1)
    stacks, _ = ask_stacks(hosts.client)
    assert [process.child for process in stacks] == ["", "sleep"]
    assert "no stacks: not a Python program" in stacks[0].problem
    hosts.stop()


def test_the_ranks_of_a_run_on_an_allocation(folder: Path, script: Callable[[str], str]) -> None:
    path = script(SLEEPS)
    hosts = Live(folder, torchrun(path, nnodes=2), replicas=2).ready()
    assert ask_stacks(hosts.client) == ([], {})
    running = hosts.job.run_spmd_async(workspace=None)

    def are_there() -> bool:
        stacks = stacks_of(hosts)
        return len(stacks) == 4 and all(functions(stack)[-1:] == ["<module>"] for stack in stacks.values())

    until(are_there, "four ranks in their program", every=0.1)
    running.cancel()
    hosts.stop()
    for host in (0, 1):
        assert "main thread" in (hosts.logs(host) / "run_1" / "attempt_0" / "stacks.txt").read_text()


def _refusal(hosts: Hosts) -> str:
    """Return why replica 0 refuses to tell the stacks; empty if it does not listen yet."""
    try:
        ask_stacks(hosts.client)
    except RefusedError as refusal:
        return str(refusal).rpartition(": ")[2]
    except UnreachableError:
        return ""
    raise AssertionError("it does not refuse")


def test_a_job_without_ranks_yet_and_one_that_has_ended(folder: Path, script: Callable[[str], str]) -> None:
    hosts = Hosts(folder, torchrun(script("pass"), nnodes=2), replicas=2, options=NO_PRELOAD)
    with pytest.raises(UnreachableError):
        ask_stacks(hosts.client)
    hosts.start(0)
    until(lambda: _refusal(hosts) == "the hosts are not together", "replica 0 to listen")
    hosts.start(1)
    assert hosts.wait() == [0, 0]
    with pytest.raises(UnreachableError):
        ask_stacks(hosts.client)


def test_a_profile_shows_where_a_rank_spends_its_time(folder: Path, script: Callable[[str], str]) -> None:
    path = script(f"""
        {READY}
        def computes():
            ready()
            while True:
                sum(range(1000))
        def waits():
            ready()
            time.sleep(1000)
        [computes, waits, waits][rank]()
    """)
    hosts = Hosts(folder, torchrun(path, nproc=3), options=("--grace", "1", "--preload", "json")).start()
    wait_for(hosts, "ready", 3)
    profiles, missing = ask_profiles(hosts.client, [0, 1], 1)
    assert not missing and [profile.rank for profile in profiles] == [0, 1]
    [stack, *_] = profiles[0].samples
    assert stack.startswith("<module> (") and f";computes ({path}:" in stack, profiles[0]
    if sys.version_info >= (3, 11):  # py-spy takes the main thread of a fork of Python 3.10 for a busy one
        assert "--idle" in profiles[1].problem and not profiles[1].samples
    profiles, _ = ask_profiles(hosts.client, [1], 1, idle=True)
    assert any(f";waits ({path}:" in stack for stack in profiles[0].samples)
    assert ask_profiles(hosts.client, [7], 1) == ([], {})
    with pytest.raises(RefusedError, match="seconds=1000000000.0 is not between 1 and 600"):
        ask_profiles(hosts.client, [], 1e9)
    hosts.stop()


def test_a_profile_ends_with_its_rank(folder: Path, script: Callable[[str], str]) -> None:
    path = script(f"{READY}\nready()\nwhile not os.path.exists(os.environ['SEEN']): sum(range(1000))\n")
    seen = folder / "seen"
    hosts = Hosts(folder, torchrun(path), options=NO_PRELOAD, environ={"SEEN": str(seen)}).start()
    wait_for(hosts, "ready", 2)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask_profiles, hosts.client, (), 600)
        until(lambda: len(samplers(hosts)) == 2, "py-spy")
        started = samplers(hosts)
        seen.touch()
        assert hosts.wait() == [0], hosts.err()
        with contextlib.suppress(UnreachableError):
            asked.result()
    until(lambda: not any(sampler.is_running() for sampler in started), "the end of py-spy")


def test_a_profile_ends_with_its_client(folder: Path, script: Callable[[str], str]) -> None:
    hosts = Hosts(folder, torchrun(script(SLEEPS), nnodes=2), replicas=2, options=NO_PRELOAD).start()
    wait_for(hosts, "ready", 4)
    greeting = {"type": "profile", "ranks": [], "seconds": 600, "idle": False}
    with Connection.open(Target(Address("unix", path=str(folder / "r.sock"))), greeting):
        until(lambda: len(samplers(hosts)) == len(samplers(hosts, 1)) == 2, "py-spy on both hosts")
    until(lambda: not samplers(hosts) + samplers(hosts, 1), "its end")
    hosts.stop()


def test_a_rank_without_stacks_is_stopped_all_the_same(folder: Path, script: Callable[[str], str]) -> None:
    # Rank 1 does not answer, because the program has a handler of its own; rank 2 cannot be asked.
    path = script(f"""
        {READY}
        if rank == 1:
            signal.signal({int(STACKS_SIGNAL)}, lambda *_: None)
        if rank == 2:
            signal.pthread_sigmask(signal.SIG_BLOCK, {{{int(STACKS_SIGNAL)}}})
        open(f"{{os.environ['SEEN']}}{{rank}}", "w").close()
        while not all(os.path.exists(f"{{os.environ['SEEN']}}{{other}}") for other in (1, 2)):
            time.sleep(0.01)
        if rank == 0:
            sys.exit(3)
        time.sleep(1000)
    """)
    hosts = Hosts(folder, torchrun(path, nproc=3), options=NO_PRELOAD, environ={"SEEN": str(folder / "s")}).start()
    assert hosts.wait() == [3]
    text = (hosts.logs(0) / "attempt_0" / "stacks.txt").read_text()
    assert "main thread: has not answered; it is " in text
    assert "main thread: blocks the signal that asks for stacks" in text


def test_log_dir_dev_null_keeps_no_stacks(folder: Path, script: Callable[[str], str]) -> None:
    path = script("""
        if rank == 0:
            sys.exit(3)
        time.sleep(1000)
    """)
    command = ["torchrun", "--nproc-per-node", "2", "--log-dir", os.devnull, path]
    hosts = Hosts(folder, command, options=NO_PRELOAD).start()
    assert hosts.wait() == [3]
    assert not list(folder.rglob("stacks.txt"))
