# SPDX-License-Identifier: BSD-3-Clause
"""A rank that needs more memory than its host's cgroup has: what the log says of it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.local.hosts import NO_PRELOAD, Hosts
from tests.waits import until

LIMIT_MIB = 768
ENTER = 'echo $$ > "$1/cgroup.procs" && shift && exec "$@"'


@pytest.fixture
def cgroup(leaves_nothing: None) -> Iterator[Path]:
    """A memory cgroup of ``LIMIT_MIB``, version 1 or 2; gone with its processes."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    top, limit = (v1, "memory.limit_in_bytes") if (v1 / "memory.limit_in_bytes").exists() else (v2, "memory.max")
    path = top / f"torchx-monarch-{uuid.uuid4().hex[:8]}"
    try:
        path.mkdir()
        (path / limit).write_text(str(LIMIT_MIB << 20))
    except OSError as error:
        if path.is_dir():
            path.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield path
    until(lambda: not (path / "cgroup.procs").read_text(), "the end of the cgroup's processes")
    path.rmdir()


def test_a_rank_that_the_kernel_kills_for_want_of_memory(
    folder: Path, script: Callable[[str], str], cgroup: Path
) -> None:
    path = script(f"""
        if rank == 1:
            filled = b"x" * ({LIMIT_MIB} << 20)
        time.sleep(1000)
    """)
    command = ["torchrun", "--nproc-per-node", "2", path]
    hosts = Hosts(folder, command, options=NO_PRELOAD, wrapper=("/bin/sh", "-c", ENTER, "sh", str(cgroup))).start()
    assert hosts.wait() == [137]
    said = hosts.err()
    assert "rank 1" in said
    assert "was killed by signal 9 (SIGKILL): probably for want of memory: the kernel's OOM killer has killed 1" in said
    assert f"(the memory limit of its cgroup is {LIMIT_MIB} MiB)" in said
