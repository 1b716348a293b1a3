# SPDX-License-Identifier: BSD-3-Clause
"""What torch's flight recorder has of ranks that failed or were stopped, read by torch's own analyser."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.local.hosts import Hosts, torchrun
from tests.local.test_stacks import wait_for
from tests.waits import WITHIN
from torchx_monarch.host.ranks.flight_recorders import FlightRecorders, collect, status
from torchx_monarch.host.ranks.rank_process import Rank
from torchx_monarch.host.ranks.rank_recorder import FAILURE, GROUPS, HEAD, MAX_RECENT
from torchx_monarch.insight.group_calls import Collective, GroupStatus
from torchx_monarch.system import children
from torchx_monarch.system.console import WriterThread

START = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
"""


def test_the_analyser_names_the_rank_that_others_wait_for(folder: Path, script: Callable[[str], str]) -> None:
    path = script(f"""{START}
        group = dist.new_group([0, 1])
        for _ in range(3):
            dist.all_reduce(torch.ones(3))
        print("ready", flush=True)
        if rank == 3:
            time.sleep(1000)
        dist.all_reduce(torch.ones(7))
    """)
    hosts = Hosts(folder, torchrun(path, nproc=4), options=("--grace", "5")).start()
    wait_for(hosts, "ready", 4)
    hosts.stop()
    dumps = hosts.logs(0) / "attempt_0" / "flight_recorder"
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(dumps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN)
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert "missing ranks: {3}" in said and "collective: gloo:all_reduce" in said and "input sizes: [[7]]" in said


def test_a_rank_that_fails_gives_its_dump_too(folder: Path, script: Callable[[str], str]) -> None:
    path = script(f"""{START}
        dist.all_reduce(torch.ones(3))
        if rank == 1:
            import atexit
            atexit.register(time.sleep, 60)  # the peer has lost it, and it is stopped, long before its exit
            atexit.register(dist.destroy_process_group)
            raise SystemExit(3)
        dist.all_reduce(torch.ones(7))
    """)
    hosts = Hosts(folder, torchrun(path), options=("--grace", "5")).start()
    assert hosts.wait() == [3], hosts.err()
    assert "FAILED: rank 1" in hosts.err(), hosts.err()
    kept = {path.name for path in (hosts.logs(0) / "attempt_0" / "flight_recorder").iterdir()}
    assert kept == {"gloo_rank_0", "gloo_rank_1"}


def test_a_program_that_succeeds_or_forms_no_group_leaves_nothing(folder: Path, script: Callable[[str], str]) -> None:
    path = script(f"""
        import threading
        def count():
            return len(sys._current_frames()), threading.active_count(), len(threading.enumerate())
        before = count()
        if rank == 0 and os.environ["WORLD_SIZE"] == "1":{START.replace("        ", "            ")}
            dist.all_reduce(torch.ones(3))
            child = os.fork()
            if child == 0:
                os._exit(5 + len(threading.enumerate()))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6
        print("counts", before, count()[1:], flush=True)
    """)
    hosts = Hosts(folder, torchrun(path, nproc=1), options=("--grace", "5")).start()
    assert hosts.wait() == [0], hosts.err()
    assert "counts (1, 1, 1) (1, 1)" in hosts.out()
    assert not list(folder.rglob("flight_recorder"))


# -- the host's side, without ranks ------------------------------------------------------------------------------------


def dump(content: bytes = b"", size: int | None = None) -> bytes:
    """A dump as a rank sends it; ``size`` is what it says."""
    return HEAD.pack(b"g", len(content) if size is None else size) + content


@contextlib.contextmanager
def this_process(logs: Path | None = None) -> Iterator[Rank]:
    """Have this process count as a rank."""
    rank = Rank(0, 0, lambda: None)
    rank.pid, rank.directory = os.getpid(), logs
    children.owners[rank.pid] = rank
    try:
        yield rank
    finally:
        children.owners.pop(rank.pid, None)
        rank.pid = 0
        rank.discard()


async def _send(folder: Path, sent: bytes, logs: Path | None) -> None:
    """Send bytes as a rank would, or as another process without logs, and wait until the host has hung up."""
    recorders, loop = FlightRecorders(str(folder), WriterThread()), asyncio.get_running_loop()
    await recorders.start()
    await recorders.start()  # for the next run of an allocation
    with socket.socket(socket.AF_UNIX) as client, this_process(logs) as rank:
        if logs is None:
            del children.owners[rank.pid]
        client.setblocking(False)
        await loop.sock_connect(client, recorders.path)
        with contextlib.suppress(ConnectionError):
            await loop.sock_sendall(client, sent)
            await collect([rank])
            client.shutdown(socket.SHUT_WR)
            while await loop.sock_recv(client, 10):
                pass
    assert recorders._server is not None
    recorders._server.close()
    await recorders._server.wait_closed()


@pytest.mark.parametrize(
    "sent",
    [
        dump(b"x" * 100, 1 << 60),
        dump(b"x" * 50, 100),
        b"",
        dump() * 1000,
        b"?" + dump(),
        HEAD.pack(GROUPS, 2) + b"[]",
        HEAD.pack(FAILURE, 1) + b"x",
    ],
    ids=len,
)
def test_what_is_no_dump_is_not_stored(folder: Path, sent: bytes) -> None:
    file = folder / "flight_recorder" / "gloo_rank_0"
    asyncio.run(_send(folder, sent, folder / "0"))
    assert not file.exists() or file.read_bytes() == b""


def test_a_dump_replaces_the_last_one_and_follows_no_link(folder: Path) -> None:
    dumps, other = folder / "flight_recorder", folder / "other"
    other.write_text("mine")
    dumps.mkdir()
    (dumps / "gloo_rank_0").symlink_to(other)
    asyncio.run(_send(folder, dump(b"one") + dump(b"two"), folder / "0"))
    assert (dumps / "gloo_rank_0").read_bytes() == b"two" and other.read_text() == "mine"
    assert [path.name for path in dumps.iterdir()] == ["gloo_rank_0"]


def test_a_dump_of_a_process_that_is_no_rank_is_dropped(folder: Path) -> None:
    asyncio.run(_send(folder, dump(b"one"), None))
    assert {path.name for path in folder.iterdir()} <= {"recorder"}  # which Python removes itself from 3.13 on


GROUP = {"name": "0", "ranks": "0-1", "enqueued": 3, "completed": 2}
ENTRY = {"number": 3, "name": "gloo:all_reduce", "sizes": [[7], []], "called": 1.5}


async def _answers(folder: Path, answer: bytes | None) -> dict[int, tuple[GroupStatus, ...]]:
    """What the host has of a rank that answers the request for its groups so; None for one that does not answer."""
    recorders, loop = FlightRecorders(str(folder), WriterThread()), asyncio.get_running_loop()
    await recorders.start()
    other = Rank(1, 1, lambda: None)
    with socket.socket(socket.AF_UNIX) as client, this_process() as rank:
        client.setblocking(False)
        await loop.sock_connect(client, recorders.path)
        while rank.recorder is None:
            await asyncio.sleep(0.001)
        within = 0.2 if answer is None else 20
        first, second = (asyncio.ensure_future(status([rank, other], within)) for _ in "12")
        assert await loop.sock_recv(client, 10) == GROUPS  # one request for both
        if answer is not None:
            await loop.sock_sendall(client, HEAD.pack(GROUPS, len(answer)) + answer)
        assert await first == await second
        client.shutdown(socket.SHUT_WR)
        while await loop.sock_recv(client, 10):
            pass
    other.discard()
    assert recorders._server is not None
    recorders._server.close()
    await recorders._server.wait_closed()
    return first.result()


def test_the_groups_of_a_rank_are_decoded(folder: Path) -> None:
    sent = json.dumps([{**GROUP, "waiting": ENTRY, "recent": [ENTRY] * 100}]).encode()
    entry = Collective(3, "gloo:all_reduce", ((7,), ()), 1.5)
    groups = (GroupStatus("0", "0-1", 3, 2, entry, (entry,) * MAX_RECENT),)
    assert asyncio.run(_answers(folder, sent)) == {os.getpid(): groups, 0: ()}


def test_a_rank_that_does_not_answer_has_no_groups(folder: Path) -> None:
    assert asyncio.run(_answers(folder, None)) == {0: ()}


@pytest.mark.parametrize(
    "sent",
    [
        b"", b"{}", b"[1]", b"[" * 100_000, b"\xff", b"9" * 5000,
        *(json.dumps([{**GROUP, **wrong}]).encode() for wrong in (
            {"ranks": [0, 1]}, {"ranks": "-1"}, {"ranks": "0-9999999"}, {"ranks": "1-2:0"},
            {"enqueued": 1 << 60}, {"enqueued": "3"}, {"completed": None},
            {"waiting": {**ENTRY, "called": float("nan")}}, {"recent": [{**ENTRY, "sizes": [["x"]]}]}, {"name": 7},
            {"recent": [{**ENTRY, "number": -1}]}, {"waiting": {**ENTRY, "called": 1e300}},
        )),
    ],
)  # fmt: skip
def test_groups_that_no_rank_of_ours_sends_are_refused(folder: Path, sent: bytes) -> None:
    assert asyncio.run(_answers(folder, sent)) == {os.getpid(): (), 0: ()}
