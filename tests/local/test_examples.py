# SPDX-License-Identifier: BSD-3-Clause
"""Trainings in examples/ that save checkpoints: a rank is killed, and the restart resumes after the last saved step."""

from __future__ import annotations

import re
from pathlib import Path

from torchx.runner import Runner
from torchx.specs import AppState

EXAMPLES = Path(__file__).parents[2] / "examples"

# In the first attempt rank 0 is killed in its second save: all shards are written, the file that describes them is not.
KILLED_IN_A_SAVE = """
import os, runpy, signal, sys
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict
from torch.distributed.fsdp import fully_shard
saves, finish = [], dcp.FileSystemWriter.finish
def finish_or_die(*args, **kwargs):
    saves.append(1)
    if len(saves) == 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    finish(*args, **kwargs)
dcp.FileSystemWriter.finish = finish_or_die
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def test_sharded_checkpoints_survive_a_kill_during_a_save(runner: Runner, tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(KILLED_IN_A_SAVE)
    folder = tmp_path / "checkpoints"
    program = [str(tmp_path / "killed.py"), str(EXAMPLES / "fsdp2_dcp.py"), "--folder", str(folder)]
    steps = ["--steps", "4", "--save-every", "1"]
    handle = runner.run_component(
        "monarch.spmd", ["--nproc", "2", "--max_restarts", "1", *program, *steps], "monarch_local"
    )
    status = runner.wait(handle, wait_interval=0.1)
    log = "\n".join(runner.log_lines(handle, "killed"))
    assert status is not None and status.state is AppState.SUCCEEDED, log
    assert re.findall("world size 2, after step .*", log) == [f"world size 2, after step {step}" for step in (0, 1)]
    assert sorted(path.name for path in folder.iterdir()) == ["step-3", "step-4"]
