# SPDX-License-Identifier: BSD-3-Clause
"""What the tests that run host processes and programs share."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torchx.runner import Runner, get_runner

from tests.local.detached import Detached
from tests.local.live import Live
from tests.local.place import LocalPlace


@pytest.fixture
def apps(leaves_nothing: None) -> Detached:
    """Apps on monarch_local, in the test's own state folder."""
    return Detached()


@pytest.fixture
def place(leaves_nothing: None, tmp_path: Path) -> Iterator[LocalPlace]:
    """Yield monarch_local, as the contract uses it; its apps are deleted."""
    place = LocalPlace(tmp_path)
    yield place
    place.close()


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Writes the program of ranks, which knows ``rank`` and ``attempt``; its path."""

    def write(text: str) -> str:
        path = tmp_path / "prog.py"
        names = "('RANK', 'TORCHELASTIC_RESTART_COUNT')"
        start = f"import os, sys, time, signal\nrank, attempt = (int(os.environ[name]) for name in {names})\n"
        path.write_text(start + textwrap.dedent(text))
        return str(path)

    return write


@pytest.fixture
def runner(leaves_nothing: None) -> Iterator[Runner]:
    """TorchX's Runner with the installed schedulers; ends what a test that fails has left on this machine."""
    with get_runner() as runner:
        yield runner
        for app in runner.list("monarch_local"):
            runner.cancel(app.app_handle)
            runner.wait(app.app_handle, wait_interval=0.1)


@pytest.fixture
def live(folder: Path) -> Iterator[Callable[..., Live]]:
    """Makes an allocation of hosts with a command, and waits until it is ready."""
    made: list[Live] = []

    def make(*command: str, **more: Any) -> Live:
        made.append(Live(folder, list(command) or ["torchrun", "--nproc-per-node", "1", "nosuch.py"], **more))
        return made[-1].ready()

    yield make
    for allocation in made:
        allocation.kill()
