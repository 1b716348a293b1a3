# SPDX-License-Identifier: BSD-3-Clause
"""Trainings in examples/ that save checkpoints resume after the last that is complete, and those with actors learn."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest
from torchx.runner import Runner
from torchx.specs import AppState

EXAMPLES = Path(__file__).parents[2] / "examples"

# In the first attempt rank 0 is killed in its second save: weights are written, what makes them a checkpoint is not.
KILLED_IN_A_SAVE = """
from {module} import {owner}
import os, runpy, signal, sys
saves, finish = [], {owner}.{finish}
def finish_or_die(*args, **kwargs):
    saves.append(1)
    if len(saves) == 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return finish(*args, **kwargs)
{owner}.{finish} = finish_or_die
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


NIGHTLY = pytest.mark.nightly("as long as the first, with a package that the tests do not install")


@pytest.mark.parametrize(
    ("example", "package", "module", "owner", "finish", "saved"),
    [
        ("fsdp2_dcp.py", "torch", "torch.distributed.checkpoint", "FileSystemWriter", "finish", ["step_4"]),
        pytest.param(
            "huggingface_trainer.py",
            "transformers",
            "transformers",
            "TrainerState",
            "save_to_json",
            ["checkpoint-3", "checkpoint-4"],
            marks=NIGHTLY,
        ),
        pytest.param(
            "accelerate_loop.py",
            "accelerate",
            "pathlib",
            "Path",
            "replace",
            ["step-3", "step-4"],
            marks=NIGHTLY,
        ),
        pytest.param(
            "lightning_fit.py",
            "lightning",
            "pathlib",
            "Path",
            "replace",
            ["step=1.ckpt", "step=3.ckpt", "step=4.ckpt"],
            marks=NIGHTLY,
        ),
        pytest.param(
            "deepspeed_config/train.py",
            "deepspeed",
            "pathlib",
            "Path",
            "replace",
            ["latest", "step1", "step2", "step3", "step4", "zero_to_fp32.py", "zero_to_torch.py"],
            marks=NIGHTLY,
        ),
    ],
)
def test_a_training_survives_a_kill_during_a_save(
    example: str,
    package: str,
    module: str,
    owner: str,
    finish: str,
    saved: list[str],
    runner: Runner,
    tmp_path: Path,
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    (tmp_path / "killed.py").write_text(KILLED_IN_A_SAVE.format(module=module, owner=owner, finish=finish))
    folder = tmp_path / "checkpoints"
    options = ["--nproc", "2", "--max_restarts", "1"]
    program = [str(tmp_path / "killed.py"), str(EXAMPLES / example)]
    settings = ["--folder", str(folder), "--steps", "4", "--save-every", "1"]
    handle = runner.run_component("monarch.spmd", options + program + settings, "monarch_local")
    status = runner.wait(handle, wait_interval=0.1)
    log = "\n".join(runner.log_lines(handle, "killed"))
    assert status is not None and status.state is AppState.SUCCEEDED, log
    assert re.findall("world size 2, after step (.*)", log) == ["0", "1"], log
    # The first checkpoint in memory may be on disk, too, unless the kill came before that was done.
    assert sorted({path.name for path in folder.iterdir()} - {"step_1"}) == saved


@pytest.mark.nightly("20 s of processor time; other actors are beside ranks every time")
def test_a_policy_learns_by_grpo_from_what_actors_write(runner: Runner) -> None:
    words = ["-j", "2x2", "--env", "OMP_NUM_THREADS=1", str(EXAMPLES / "grpo_with_actors" / "train.py")]
    handle = runner.run_component("monarch.spmd", words, "monarch_local")
    status = runner.wait(handle, wait_interval=0.1)
    log = "\n".join(runner.log_lines(handle, "train"))
    assert status is not None and status.state is AppState.SUCCEEDED, log
    assert "4 ranks train, 2 generators write beside them" in log
    found = re.search(r"reward (\S+) to (\S+) of 1.00 in 100 steps", log)
    assert found is not None and float(found[1]) < 0.3 and float(found[2]) > 0.9, log


@pytest.mark.nightly("needs a checkout of Monarch, in the folder that MONARCH_SOURCES names")
def test_monarchs_own_grpo_runs_unchanged(runner: Runner) -> None:
    script = Path(os.environ.get("MONARCH_SOURCES", "/"), "docs", "source", "examples", "grpo_yield.py")
    if not script.exists():
        pytest.skip("MONARCH_SOURCES names no checkout of Monarch")
    handle = runner.run_component("monarch.controller", ["--meshes", "hosts=2", str(script)], "monarch_local")
    status = runner.wait(handle, wait_interval=0.1)
    log = "\n".join(runner.log_lines(handle, "hosts"))
    assert status is not None and status.state is AppState.SUCCEEDED, log
    assert "[controller] training complete at step 20" in log
