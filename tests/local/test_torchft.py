# SPDX-License-Identifier: BSD-3-Clause
"""The example with the real torchft: a group that loses its rank or its host heals from the other one."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
from pathlib import Path

import psutil
import pytest
from torchx.specs import AppState

from tests.local.detached import Detached
from tests.local.place import LocalPlace

_SCRIPT = Path(__file__).parents[2] / "examples" / "ft_digits.py"

_LOOP = "while (step := manager.current_step()) < steps:"

_ENDS = """
import os, time
def is_over():
    time.sleep(0.02)
    return os.path.exists({!r})
"""

pytestmark = [
    pytest.mark.nightly("torchft is not among what the tests install"),
    pytest.mark.skipif(
        importlib.util.find_spec("torchft") is None, reason="needs torchft: pip install torchft-nightly"
    ),
]


@pytest.mark.parametrize("lost", ["rank", "host"])
def test_a_group_heals_from_the_other(place: LocalPlace, lost: str) -> None:
    words = ("-j", "2x1", "--heartbeat_timeout_ms", "1000", "--max_retries", "1", "--env", "OMP_NUM_THREADS=1")
    command = ("run", "-s", "monarch_local", "--workspace", "", "monarch.ft", *words)
    end, script, text = place.folder / "end", place.folder / "digits.py", _SCRIPT.read_text()
    assert _LOOP in text  # how long the lost group needs depends on the machine
    script.write_text(_ENDS.format(str(end)) + text.replace(_LOOP, f"{_LOOP[:-1]} or not is_over():"))
    handle = place.adopt(place.torchx(*command, str(script)).split()[-1])

    def together(group: int) -> list[int]:
        """Return the steps that a group has shown in which both groups took part."""
        return [int(step) for step in re.findall(r"step (\d+) of 2 groups", place.log(handle, f"group{group}", 1))]

    place.until(lambda: together(0) and together(1), "steps of both groups", handle)
    before = len(together(1))
    supervisor = psutil.Process(Detached().owner(handle.rpartition("/")[2]).supervisor.pid)
    (host,) = [process for process in supervisor.children() if "group1" in process.cmdline()]
    ranks = [process for process in host.children(recursive=True) if str(script) in process.cmdline()]
    os.kill(host.pid if lost == "host" else ranks[-1].pid, signal.SIGKILL)
    place.until(lambda: len(together(1)) > before + 1, "steps after the loss", handle)
    end.touch()
    place.wait(handle, AppState.SUCCEEDED)
    for group in (0, 1):
        assert place.log(handle, f"group{group}", 1).count("accuracy 0.9") == 1
        steps = [step for step in together(group) if step > 0]  # a new process begins with 0, until it has healed
        assert steps == sorted(steps)
