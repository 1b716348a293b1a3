# SPDX-License-Identifier: BSD-3-Clause
"""``checkpoint`` and ``last_checkpoint`` in the program of a rank, with hosts and without, and what they rest on."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from tests.unit.test_sync_store import write
from torchx_monarch import checkpoint, last_checkpoint
from torchx_monarch.controller.checkpoints import Checkpoints, _Checkpoint, _HeldPart
from torchx_monarch.controller.host_messages import (
    CheckpointPart,
    HostError,
    KeepCheckpoints,
    PartSource,
    PersistCheckpoint,
    RestoreCheckpoint,
)
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.members import Member, Members, MemberState
from torchx_monarch.host.checkpoint_files import PartError, PartFiles, checked
from torchx_monarch.host.checkpoints import HostCheckpoints
from torchx_monarch.host.host import Host
from torchx_monarch.insight import step_progress
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.codec import decode
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.model.world import HostRange, World
from torchx_monarch.system import cgroups, run_dirs, safe_files
from torchx_monarch.system.console import Console, WriterThread
from torchx_monarch.training import saved
from torchx_monarch.training.checkpoint import MEMORY, Written
from torchx_monarch.transport.connections import Address

Be = Callable[..., None]


@pytest.fixture
def be(monkeypatch: pytest.MonkeyPatch) -> Be:
    """Has this process be a rank of two, of some start."""

    def be(rank: int, start: int = 0, memory: Path | None = None) -> None:
        values = {"RANK": rank, "WORLD_SIZE": 2, "TORCHELASTIC_RESTART_COUNT": start, MEMORY: memory or ""}
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr("torchx_monarch.training.checkpoint._last_step", 0)

    be(0)
    return be


def save(folder: Path, step: int, text: str = "whole", **more: Any) -> None:
    rank = os.environ["RANK"]
    with checkpoint(step, folder, **more) as place:
        (place / f"rank_{rank}").write_text(text)


def test_without_our_hosts_a_checkpoint_counts_when_all_ranks_have_left(tmp_path: Path, be: Be) -> None:
    (tmp_path / "step_9999").mkdir()
    (tmp_path / "mine").write_text("mine")
    for rank in (0, 1):
        be(rank)
        assert last_checkpoint(tmp_path) is None
    for step in (1, 2, 3):
        for rank in (1, 0):
            be(rank)
            save(tmp_path, step)
            newest = last_checkpoint(tmp_path)
            assert (newest and newest.name) == (
                f"step_{step}" if rank == 0 else f"step_{step - 1}" if step > 1 else None
            )
    assert sorted(os.listdir(tmp_path)) == ["mine", "step_2", "step_3", "step_9999"]
    assert sorted(os.listdir(tmp_path / "step_3")) == [saved.FILES, "rank_0", "rank_1"]
    save(tmp_path, 4)  # rank 1 does not come
    be(1)
    with pytest.raises(RuntimeError), checkpoint(4, tmp_path) as folder:
        (folder / "rank_1").write_text("to")
        raise RuntimeError
    be(1, start=1)
    last_checkpoint(tmp_path)
    save(tmp_path, 4)  # what rank 0 has done before the restart does not count
    newest = last_checkpoint(tmp_path)
    assert newest and newest.name == "step_3"
    be(0, start=1)
    last_checkpoint(tmp_path)
    assert len([name for name in os.listdir(tmp_path) if name.startswith(".")]) == 1  # of this start
    save(tmp_path, 4, "again")
    newest = last_checkpoint(tmp_path)
    assert newest and newest.name == "step_4" and (newest / "rank_0").read_text() == "again"


def test_a_damaged_checkpoint_on_disk_is_not_taken(tmp_path: Path, be: Be, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        save(tmp_path, step, ranks=[0])
    (tmp_path / "step_2" / "rank_0").write_text("torn")
    newest = last_checkpoint(tmp_path)
    assert newest and newest.name == "step_1"
    assert "step_2: rank_0 is missing or has another size: taking" in capsys.readouterr().err


def test_saving_a_step_again_replaces_it(tmp_path: Path, be: Be) -> None:
    for text in ("first", "second"):
        save(tmp_path, 1, text, ranks=[0])
        assert (tmp_path / "step_1" / "rank_0").read_text() == text


@pytest.mark.parametrize(
    ("step", "more", "says"),
    [
        (-1, {}, "step is -1: give 0 or more"),
        (1, {"ranks": [1]}, r"rank 0 is not one of ranks=\[1\]"),
        (1, {"persist_every": 0}, "persist_every is 0: give a number of seconds above 0"),
    ],
    ids=["step", "ranks", "persist_every"],
)
def test_says_what_is_wrong(tmp_path: Path, be: Be, step: int, more: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        save(tmp_path, step, **more)


def test_in_memory_an_exception_leaves_no_mark_and_the_user_gets_it(tmp_path: Path, be: Be) -> None:
    be(0, memory=tmp_path)
    assert last_checkpoint() is None
    with pytest.raises(KeyError), checkpoint(5):
        raise KeyError
    assert os.listdir(tmp_path / "writing_5") == ["step_5"]
    save(tmp_path / "user", 5, persist_every=math.inf)
    written = decode(Written, safe_files.read_json(tmp_path / "writing_5" / "rank_0"), "")
    assert written.persist == str(tmp_path / "user") and written.persist_every > 1e300
    with pytest.raises(ValueError, match="step is 4, after 5: the highest counts"):
        save(tmp_path / "user", 4)
    (tmp_path / "last").symlink_to(tmp_path / "writing_5" / "step_5")
    assert last_checkpoint() == tmp_path / "writing_5" / "step_5"


def test_a_full_memory_costs_one_checkpoint_and_the_next_goes_to_the_disk(
    tmp_path: Path, be: Be, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    monkeypatch.setattr(step_progress, "set_checkpoint", counted.append)
    (memory := tmp_path / "memory").mkdir()
    (memory / "disk").symlink_to(tmp_path / "disk")
    be(1, memory=memory)
    with checkpoint(5) as folder:
        (folder / "rank_1").write_text("a little")
        be(0, memory=memory)
        with checkpoint(5):
            # As torch reports it.
            raise RuntimeError("PytorchStreamWriter failed") from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    said = capsys.readouterr().err
    assert [f"rank {rank}: no room for the checkpoint of step 5 in " in said for rank in (0, 1)] == [True, True]
    assert not (memory / "writing_5").exists() and not counted
    save(tmp_path, 6)
    assert counted == [6]
    assert (memory / "writing_6").is_symlink() and (tmp_path / "disk" / "writing_6" / "step_6" / "rank_0").exists()


def test_what_a_host_has_no_memory_for_goes_to_the_disk_before_it_is_written(tmp_path: Path, be: Be) -> None:
    (memory := tmp_path / "memory").mkdir()
    (memory / "disk").symlink_to(tmp_path / "disk")
    (memory / "size").write_text(str(1 << 60))
    be(0, memory=memory)
    save(tmp_path, 6)
    assert (memory / "writing_6").is_symlink()


def test_the_limit_of_the_cgroup_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/job/step\n",
        "sys/fs/cgroup/job/step/memory.max": "max\n",
        "sys/fs/cgroup/job/memory.max": "1000000\n",
        "sys/fs/cgroup/job/memory.current": "800000\n",
        "sys/fs/cgroup/job/memory.stat": "inactive_anon 700\ninactive_file 5000\n",
    }
    assert cgroups.room_in(write(tmp_path, files), tmp_path) == 205_000


def test_links_and_devices_are_no_files_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_text("12345")
    assert saved.sizes(tmp_path) == {"inner/file": 5}
    (tmp_path / "inner" / "link").symlink_to("/etc/passwd")
    with pytest.raises(saved.NotWholeError, match="link' is no ordinary file"):
        saved.sizes(tmp_path)


def test_the_memory_of_a_killed_process_is_freed_by_the_next(tmp_path: Path) -> None:
    program = (
        "from torchx_monarch.system import run_dirs; print(run_dirs.new_memory_dir('app/1')[0], flush=True); input()"
    )
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = process.stdout.readline().strip()
        assert left.startswith("/dev/shm/tm-memory-app_1-") and os.stat(left).st_mode & 0o777 == 0o700
        run_dirs.remove_left_memory()
        assert os.path.exists(left)
        process.kill()
    run_dirs.remove_left_memory()
    assert not os.path.exists(left)


def test_a_host_without_shared_memory_has_sockets_with_a_long_tmpdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (long := tmp_path / ("x" * 60)).mkdir()
    monkeypatch.setattr(run_dirs, "_MEMORY", "/no/such/folder")
    monkeypatch.setenv("TMPDIR", str(long))
    path, lock = run_dirs.new_memory_dir("an-app-with-a-long-name-trainer-0")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
        ready.bind(os.path.join(path, "ready"))
    os.close(lock)
    run_dirs.remove_tree(path)


def checkpoints_of(sockets: Path, report: AsyncMock | None = None) -> Awaitable[HostCheckpoints]:
    """Those of a host with a folder for its sockets."""
    console = Console(2)
    host = Host(HostSpec(), {}, "here", console, console, "", Reporter(console, None, ""), str(sockets), report=report)
    host.network = HostNetwork(Address("unix", path="/nowhere"))
    return HostCheckpoints.create(host)


def test_a_checkpoint_for_which_there_is_no_room_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks begin with an earlier one, or from the start."""
    (no_disk := tmp_path / "disk").touch()
    monkeypatch.setattr("torchx_monarch.host.checkpoints.room_in", lambda folder: 0)

    async def main() -> str:
        checkpoints = await checkpoints_of(no_disk)
        part = CheckpointPart(1, 0, 0, (0,), (), 1, 10, "", 1.0, True)
        try:
            return await checkpoints.restore(RestoreCheckpoint((PartSource(part, ()),)))
        finally:
            checkpoints.close()()

    assert "host 0 lacks the part of host 0: [Errno " in asyncio.run(main())


def test_damage_after_files_were_linked_for_an_attempt_is_found_before_the_next(tmp_path: Path) -> None:
    (kept := tmp_path / "copy").mkdir()
    (given := tmp_path / "generation").mkdir()
    (kept / "rank_0").write_text("whole")

    async def main() -> None:
        part = CheckpointPart(1, 0, 0, (0,), (), 1, 5, "", 1.0, True)
        files = PartFiles(part, str(kept), asyncio.ensure_future(checked(str(kept), {"rank_0": 5})))
        for _ in range(2):
            await files.copy_to(str(given), link=True)
        (kept / "rank_0").write_text("wrong")
        with pytest.raises(PartError, match="rank_0 is damaged"):
            await files.copy_to(str(given), link=True)
        await files.remove(str(given))

    asyncio.run(main())
    assert not any([*kept.iterdir(), *given.iterdir()])  # so that the part comes from another host


def test_a_host_reports_no_checkpoints_of_a_run_that_has_ended(tmp_path: Path) -> None:
    """Such as when it ends to copy one: replica 0 would take them for those of the next run."""

    async def main() -> None:
        report = AsyncMock()
        checkpoints = await checkpoints_of(tmp_path, report)
        await checkpoints.keep(KeepCheckpoints((), None))
        report.assert_awaited_once()
        free = checkpoints.close()
        await checkpoints.keep(KeepCheckpoints((), None))
        report.assert_awaited_once()
        free()

    asyncio.run(main())


def test_what_hosts_have_copied_is_removed_after_the_last_has_ended_to_copy() -> None:
    asked, copies = [], asyncio.Event()

    async def ask_host(request: PersistCheckpoint, replica: int) -> str:
        if request.replicas:
            if replica == 0:
                asyncio.get_running_loop().call_later(0.05, copies.set)
                raise HostError("the connection of host 0 has ended")
            await copies.wait()
        asked.append((replica, request.replicas))
        return ""

    async def main() -> str:
        copies.clear()
        hosts: Any = SimpleNamespace(members=Members(2), reporter=None, ask_host=ask_host)
        parts = {}
        for replica in range(2):
            part = CheckpointPart(1, 0, replica, (replica,), (), 2, 10, "/persist", 1.0, True)
            parts[replica] = _HeldPart(part, [Member(Registration(replica, "here", 1), MemberState.ABLE)])
        return await Checkpoints(hosts)._copy(_Checkpoint(parts), "/persist")

    assert asyncio.run(main()) == "the connection of host 0 has ended"
    assert asked == [(1, (1,)), (0, ())]


def test_a_host_says_that_some_ranks_do_not_save(tmp_path: Path, be: Be, capfd: pytest.CaptureFixture[str]) -> None:
    """As in a program with ``if rank == 0`` around a checkpoint for all ranks, which would lose all of them."""

    async def main() -> None:
        checkpoints = await checkpoints_of(tmp_path)
        checkpoints.world = World(0, 0, 0, (HostRange(0, 1, 4),), "", 0, False, "")
        be(0, memory=checkpoints.folder)
        for step in range(4):
            save(tmp_path, step)
            assert (await checkpoints.find()).parts == ()
        WriterThread.finish()
        checkpoints.close()()

    asyncio.run(main())
    said = "3 checkpoints do not count, because ranks 1-3 of this host did not save them; if only rank 0 saves: "
    assert capfd.readouterr().err == f"[monarch] host 0: {said}checkpoint(step, ranks=[0])\n"


def test_a_host_ignores_what_a_rank_gives_up_as_the_host_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host would look for no checkpoint any more."""
    os.symlink(tmp_path / "disk" / "writing_1", tmp_path / "writing_1")
    (tmp_path / "writing_2").mkdir()
    is_link, read_link = os.path.islink, os.readlink

    def give_up(path: str) -> str:
        if is_link(path):
            os.unlink(path)
        return path

    monkeypatch.setattr(os.path, "islink", lambda path: is_link(path) and bool(give_up(path)))
    monkeypatch.setattr(os, "readlink", lambda path: read_link(give_up(path)))
    checkpoints: Any = SimpleNamespace(folder=tmp_path, _disk=str(tmp_path / "disk"))
    assert (str(tmp_path / "writing_2"), 2) in HostCheckpoints._writing(checkpoints)
