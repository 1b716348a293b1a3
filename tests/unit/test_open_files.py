# SPDX-License-Identifier: BSD-3-Clause
"""What a process says that may not have enough files open."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waits import WITHIN
from torchx_monarch.system import processes


@pytest.fixture
def limit() -> Iterator[int]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
    yield 64
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_an_error_for_want_of_descriptors_names_the_limit(limit: int) -> None:
    opened = []
    with pytest.raises(OSError) as caught:
        while True:
            opened.append(os.dup(2))
    for descriptor in opened:
        os.close(descriptor)
    assert processes.limit_hint(caught.value) == f" (RLIMIT_NOFILE is {limit}: ulimit -n)"
    assert "ulimit -u" in processes.limit_hint(OSError(errno.EAGAIN, "try again"))
    assert "ulimit -u" in processes.limit_hint(RuntimeError("can't start new thread"))
    assert "fs.file-max" in processes.limit_hint(OSError(errno.ENFILE, "too many"))
    assert processes.limit_hint(OSError(errno.ENOENT, "no such file")) == processes.limit_hint(ValueError("x")) == ""


_READ_LOGS = """if True:
    import argparse, contextlib, resource, sys
    from types import SimpleNamespace
    from torchx_monarch.backends.core.snapshot import AppSnapshot, ReplicaSnapshot, RoleSnapshot
    from torchx_monarch.backends.core.timed_line import LogQuery
    from torchx_monarch.cli import jobs, logs
    from torchx_monarch.model.role_spec import RoleSpec
    from torchx_monarch.model.state import State
    from torchx_monarch.schedulers import command, monarch_local
    from torchx_monarch.supervisor import log_files

    LIMIT = 64
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    replicas = [ReplicaSnapshot("r", replica, State.SUCCEEDED) for replica in range(LIMIT)]
    app = AppSnapshot("a", "a", [RoleSnapshot(RoleSpec("r", LIMIT), replicas)])
    found = app, SimpleNamespace(state=State.SUCCEEDED)

    def lines(app, role, replica, **_):
        return log_files.lines(".", LogQuery())

    scheduler = monarch_local("torchx")
    scheduler.apps = SimpleNamespace(read=lambda _: found, recent=lambda _: found, replica_log=lines)
    scheduler.apps.lines = lambda *place, **_: (line.text for line in lines(*place))
    if sys.argv[1] == "log":
        command.running = command.TorchXCommand(argparse.Namespace(), sys.stdout)
        opened = [iter(scheduler.log_iter("a", "r", replica)) for replica in range(LIMIT)]
        print(*(next(log) for log in opened), sep="")
        sys.exit()
    jobs.opened = lambda _: contextlib.nullcontext(scheduler)
    names = ("role", "rank", "since", "tail", "timestamps", "follow", "json")
    logs.run(argparse.Namespace(handle="monarch_local://torchx/a", **dict.fromkeys(names)))
"""


@pytest.mark.parametrize(("command", "lines"), [("log", 1), ("monarch", 1500)])
def test_the_logs_of_more_replicas_than_files_may_be_open(command: str, lines: int, tmp_path: Path) -> None:
    (tmp_path / "combined.log").write_text("a line\n" * 1500)  # of which 1000 are read ahead
    (tmp_path / "torchx").write_text(_READ_LOGS)
    words = [sys.executable, "torchx", command]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=WITHIN)
    assert (done.returncode, done.stderr) == (0, "")
    assert "cannot be read" not in done.stdout and done.stdout.count("a line\n") == lines * 64
