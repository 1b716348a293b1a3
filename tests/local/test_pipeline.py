# SPDX-License-Identifier: BSD-3-Clause
"""examples/pipeline.py, jobs that follow each other; and the example with the real torchft, whose groups heal."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest
from torchx.runner import get_runner
from torchx.specs import AppState

from tests.local.detached import Detached
from tests.local.place import LocalPlace

SCRIPT = Path(__file__).parents[2] / "examples" / "pipeline.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name in ("TORCHX_TRACKERS", "TORCHX_TRACKER_FSSPEC_CONFIG"):  # which it sets
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    spec = importlib.util.spec_from_file_location("pipeline", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.nightly(
    "10 s of processor time: four jobs that load a data set; a job that is cancelled is tested every time"
)
def test_the_pipeline_finds_the_best_setting(tmp_path: Path, example: ModuleType) -> None:
    command = [sys.executable, str(SCRIPT), "--folder", str(tmp_path), "--settings", "0.01,10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "best of 2: alpha 0.01 with 9" in done.stdout
    assert done.stdout.count("SUCCEEDED  monarch_local://torchx/") == 4  # the list at the end

    tracker = example.open_tracker(str(tmp_path / "tracker.conf"))
    (data,) = (run_id for run_id in tracker.run_ids() if "/split-" in run_id)
    assert [Path(tracker.artifacts(data)["folds"].path).name, tracker.metadata(data)["images"]] == ["folds.npz", 1797]
    fits = [run_id for run_id in tracker.run_ids(parent_run_id=data) if "/fit-" in run_id]
    # Both ranks of each have found out what their parent is, and have said how they did.
    assert [{"accuracy_0", "accuracy_1", "alpha"} == set(tracker.metadata(run_id)) for run_id in fits] == [True, True]


def test_a_job_that_takes_too_long_is_cancelled(
    tmp_path: Path, example: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "slow.py"
    script.write_text("import time\nprint('begun', flush=True)\ntime.sleep(1000)\n")
    monkeypatch.setattr(example, "__file__", str(script))
    with get_runner() as runner:
        pipeline = example.Pipeline(runner, "monarch_local", tmp_path, patience=1.0)
        handle = pipeline.submit("fit", "--alpha", "1")
        for _line in runner.log_lines(handle, "slow", should_tail=True, regex="begun"):
            break
        assert pipeline.finish(handle, timeout=0.1) is AppState.CANCELLED
    assert "begun" in capfd.readouterr().out


_SCRIPT = Path(__file__).parents[2] / "examples" / "ft_digits.py"

_LOOP = "while (step := manager.current_step()) < steps:"

_ENDS = """
import os, time
def is_over():
    time.sleep(0.02)
    return os.path.exists({!r})
"""


@pytest.mark.nightly("torchft is not among what the tests install")
@pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="needs torchft: pip install torchft-nightly")
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
