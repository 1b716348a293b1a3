# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What torch's flight recorder has of ranks that failed or were stopped, read by torch's own analyser."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.local.hosts import Hosts
from tests.local.test_stacks import stop, torchrun, wait_for
from torchx_monarch.host.ranks.rank_recorder import SIZE
from torchx_monarch.host.ranks.recorder_dumps import RecorderDumps

START = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
"""


def analysed(hosts: Hosts, attempt: int = 0) -> str:
    """What torch says of the dumps of all hosts."""
    folder = hosts.folder / "dumps"
    for replica in hosts.processes:
        shutil.copytree(hosts.logs(replica) / f"attempt_{attempt}" / "flight_recorder", folder, dirs_exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_analyser_names_the_rank_that_others_wait_for(folder: Path, script: Callable[[str], str]) -> None:
    path = script(f"""{START}
        group = dist.new_group([0, 1])
        for _ in range(3):
            dist.all_reduce(torch.ones(3))
        print("ready", flush=True)
        if rank == 3:
            time.sleep(100)
        dist.all_reduce(torch.ones(7))
    """)
    hosts = Hosts(folder, torchrun(path, nnodes=2), replicas=2, options=("--grace", "5")).start()
    wait_for(hosts, "ready", 4)
    stop(hosts)
    said = analysed(hosts)
    assert "missing ranks: {3}" in said and "collective: gloo:all_reduce" in said and "input sizes: [[7]]" in said


def test_a_rank_that_fails_gives_its_dump_too(folder: Path, script: Callable[[str], str]) -> None:
    path = script(f"""{START}
        dist.all_reduce(torch.ones(3))
        if rank == 1:
            raise SystemExit(3)
        dist.all_reduce(torch.ones(7))
    """)
    hosts = Hosts(folder, torchrun(path), options=("--grace", "5")).start()
    assert hosts.wait() == [3], hosts.err()
    kept = {path.name for path in (hosts.logs(0) / "attempt_0" / "flight_recorder").iterdir()}
    assert kept == {"rank_0", "rank_1"}
    assert "missing ranks: {1}" in analysed(hosts)


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


@pytest.fixture
def sockets() -> Path:
    return Path(tempfile.mkdtemp(prefix="h"))


async def _send(sockets: Path, sent: bytes, file: Path | None) -> None:
    """Send bytes as a rank would, and wait until the host has hung up."""
    dumps, loop = RecorderDumps(str(sockets)), asyncio.get_running_loop()
    await dumps.start()
    await dumps.start()  # for the next run of an allocation
    if file is not None:
        dumps.expect({os.getpid(): file})
    with socket.socket(socket.AF_UNIX) as rank:
        rank.setblocking(False)
        await loop.sock_connect(rank, dumps.path)
        with contextlib.suppress(ConnectionError):
            await loop.sock_sendall(rank, sent)
            await dumps.collect([os.getpid(), 1])
            rank.shutdown(socket.SHUT_WR)
            while await loop.sock_recv(rank, 10):
                pass
    assert dumps._server is not None
    dumps._server.close()
    await dumps._server.wait_closed()


@pytest.mark.parametrize(
    "sent", [SIZE.pack(1 << 60) + b"x" * 100, SIZE.pack(100) + b"x" * 50, b"", (SIZE.pack(0)) * 1000], ids=len
)
def test_what_is_no_dump_is_not_stored(sockets: Path, sent: bytes) -> None:
    file = sockets / "flight_recorder" / "rank_0"
    asyncio.run(_send(sockets, sent, file))
    assert not file.exists() or file.read_bytes() == b""
    shutil.rmtree(sockets)


def test_a_dump_replaces_the_last_one_and_follows_no_link(sockets: Path) -> None:
    folder, other = sockets / "flight_recorder", sockets / "other"
    other.write_text("mine")
    folder.mkdir()
    (folder / "rank_0").symlink_to(other)
    asyncio.run(_send(sockets, SIZE.pack(3) + b"one" + SIZE.pack(3) + b"two", folder / "rank_0"))
    assert (folder / "rank_0").read_bytes() == b"two" and other.read_text() == "mine"
    assert [path.name for path in folder.iterdir()] == ["rank_0"]
    shutil.rmtree(sockets)


def test_a_dump_of_a_process_that_is_no_rank_is_dropped(sockets: Path) -> None:
    asyncio.run(_send(sockets, SIZE.pack(3) + b"one", None))
    assert [path.name for path in sockets.iterdir()] == ["recorder"]
    shutil.rmtree(sockets)
