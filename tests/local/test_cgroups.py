# SPDX-License-Identifier: BSD-3-Clause
"""Hosts whose cgroup has less memory, or fewer processes, than they need: what their logs say of it."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.local.hosts import NO_PRELOAD, Hosts
from torchx_monarch.system import processes

LIMIT_MIB = 768
ENTER = 'echo $$ > "$1/cgroup.procs" && shift && exec "$@"'


@contextlib.contextmanager
def limited(v1: str, v2: str, limit: int) -> Iterator[tuple[str, ...]]:
    """Yield the words before a command that runs in a cgroup of its own, version 1 or 2, with a limit in a file."""
    top, old = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup", v1)
    file = old.name if old.parent.exists() else v2
    path = (old.parent if old.parent.exists() else top) / f"torchx-monarch-{uuid.uuid4().hex[:8]}"
    try:
        path.mkdir()
        (path / file).write_text(str(limit))
    except OSError as error:
        if path.is_dir():
            path.rmdir()
        pytest.skip(f"no cgroup with {file} can be made here: {error}")
    try:
        yield "/bin/sh", "-c", ENTER, "sh", str(path)
    finally:
        processes.kill_until_gone(lambda: [int(pid) for pid in (path / "cgroup.procs").read_text().split()])
        path.rmdir()


def test_a_rank_that_the_kernel_kills_for_want_of_memory(folder: Path, script: Callable[[str], str]) -> None:
    path = script(f"""
        if rank == 1:
            filled = b"x" * ({LIMIT_MIB} << 20)
        time.sleep(1000)
    """)
    command = ["torchrun", "--nproc-per-node", "2", path]
    with limited("memory/memory.limit_in_bytes", "memory.max", LIMIT_MIB << 20) as wrapper:
        hosts = Hosts(folder, command, options=NO_PRELOAD, wrapper=wrapper).start()
        assert hosts.wait() == [137]
    said = hosts.err()
    assert "rank 1" in said
    assert "was killed by signal 9 (SIGKILL): probably for want of memory: the kernel's OOM killer has killed 1" in said
    assert f"(the memory limit of its cgroup is {LIMIT_MIB} MiB)" in said


@pytest.mark.parametrize("limit", [1, 3, 5, 9, 10])
def test_the_limit_of_processes_is_named_and_no_host_hangs(
    folder: Path, script: Callable[[str], str], limit: int
) -> None:
    """Threads count as processes. The host needs some, and each rank needs two for its logs."""
    command = ["torchrun", "--nproc-per-node", "2", script("print('begun')")]
    with limited("pids/pids.max", "pids.max", limit) as wrapper:
        hosts = Hosts(folder, command, options=NO_PRELOAD, wrapper=wrapper).start()
        assert hosts.wait() == [1]
    assert "ulimit -u" in hosts.err().splitlines()[-1]
