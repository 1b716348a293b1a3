# SPDX-License-Identifier: BSD-3-Clause
"""The removal of an ended app of monarch_local."""

from __future__ import annotations

import os
import subprocess
import threading
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.waits import WITHIN, until
from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.local import folder
from torchx_monarch.backends.local.request import SupervisorRequest
from torchx_monarch.system import processes


@pytest.fixture
def job() -> str:
    """Return an app's marker that no test beside this one has: a removal kills each process with the marker."""
    return f"a-removed1:{uuid.uuid4().hex}"


@pytest.fixture
def paths(tmp_path: Path, job: str) -> state_files.AppPaths:
    """Return the paths of an app whose folder holds its request."""
    root = tmp_path / "a-removed1"
    root.mkdir(mode=0o700)
    found = state_files.AppPaths(str(root))
    state_files.write_json(found.request, asdict(SupervisorRequest("a-removed1", "a", [], job=job)))
    return found


@pytest.fixture
def supervisor(job: str) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process with the app's marker, which ends when its stdin is closed."""
    env = {**os.environ, processes.MARKER: job}
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env=env) as process:
        until(lambda: processes.marked(job), "its environment")  # the kernel shows it a little later
        yield process


def test_waits_for_the_supervisor_before_it_removes_the_folder(
    paths: state_files.AppPaths, supervisor: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_ENDING_TIME", 60.0)
    removal = threading.Thread(target=folder.remove_ended, args=[paths])
    removal.start()
    assert os.path.exists(paths.root) and supervisor.stdin is not None
    supervisor.stdin.close()
    assert supervisor.wait(WITHIN) == 0, "it has ended by itself"
    removal.join(60)
    assert not os.path.exists(paths.root)


def test_kills_what_does_not_end(
    paths: state_files.AppPaths, supervisor: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_ENDING_TIME", 0.0)
    folder.remove_ended(paths)
    assert supervisor.wait(WITHIN) == -9
    assert not os.path.exists(paths.root)


def test_removes_an_app_with_a_damaged_request(paths: state_files.AppPaths) -> None:
    Path(paths.request).write_text("{")
    folder.remove_ended(paths)
    assert not os.path.exists(paths.root)
