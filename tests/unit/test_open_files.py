# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a process says that may not have enough files open."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator

import pytest

from torchx_monarch.system import open_files


@pytest.fixture
def limit() -> Iterator[int]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
    yield 64
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_host_needs_more_for_more_ranks(limit: int) -> None:
    assert open_files.shortage(1) == ""
    assert (
        open_files.shortage(8)
        == f"RLIMIT_NOFILE is {limit}: a host with 8 ranks needs 96 open files or more (ulimit -n)"
    )


def test_replica_0_needs_more_for_more_hosts(limit: int) -> None:
    assert open_files.shortage(1, 6) == ""
    assert open_files.shortage(1, 8) == (
        f"RLIMIT_NOFILE is {limit}: replica 0 of 8 hosts, with 1 rank, needs 68 open files or more (ulimit -n)"
    )


def test_an_error_for_want_of_descriptors_names_the_limit(limit: int) -> None:
    opened = []
    with pytest.raises(OSError) as caught:
        while True:
            opened.append(os.dup(2))
    for descriptor in opened:
        os.close(descriptor)
    assert open_files.hint(caught.value) == f" (RLIMIT_NOFILE is {limit})"
    assert "ulimit -u" in open_files.hint(OSError(errno.EAGAIN, "try again"))
    assert "fs.file-max" in open_files.hint(OSError(errno.ENFILE, "too many"))
    assert open_files.hint(OSError(errno.ENOENT, "no such file")) == open_files.hint(ValueError("x")) == ""
