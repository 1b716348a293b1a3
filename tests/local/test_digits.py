# SPDX-License-Identifier: BSD-3-Clause
"""examples/digits.py is an ordinary torchrun program; these tests run it as one, without anything of ours."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "digits.py"


def train(folder: Path, *args: str, nproc: int = 1) -> subprocess.CompletedProcess[str]:
    """Runs the example with its checkpoint in `folder`, under torchrun when `nproc` is more than 1."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"] if nproc > 1 else []
    command = [sys.executable, *launcher, str(SCRIPT), "--checkpoint-dir", str(folder), *args]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    env |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder.parent)}  # torchrun leaves a folder in TMPDIR
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, cwd=folder.parent)


def epoch_lines(output: str) -> list[str]:
    return [line.split("loss")[0].strip() for line in output.splitlines() if line.startswith("epoch")]


@pytest.mark.slow
@pytest.mark.nightly("20 s of processor time for the example under torchrun; the contract runs it under this package")
def test_two_ranks_train_and_one_goes_on_to_95_percent(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    path = folder / "latest.pt"
    path.write_bytes(b"not a checkpoint")
    # 1437 images in steps of 1436: each second step has one image, so one of the ranks has none.
    first = train(folder, "--fresh", "--epochs", "2", "--batch-size", "1436", nproc=2)
    assert first.returncode == 0, first.stderr
    assert "2 ranks on cpu (gloo)" in first.stdout or "nccl" in first.stdout
    assert epoch_lines(first.stdout) == ["epoch 1/2", "epoch 2/2"]
    assert [f.name for f in folder.iterdir()] == ["latest.pt"]

    # Without a launcher, and to an end that misses its target.
    second = train(folder, "--epochs", "10", "--min-accuracy", "1")
    assert second.returncode == 1, second.stdout + second.stderr
    assert "is below --min-accuracy 100.00%" in second.stderr
    lines = second.stdout.splitlines()
    assert "1 rank on cpu (gloo)" in lines[0] or "nccl" in lines[0]
    assert lines[1] == f"resumed after epoch 2 from {path}"
    assert epoch_lines(second.stdout)[0].split()[1].startswith("3/")
    reached = re.fullmatch(rf"done: test accuracy ([\d.]+)% .*checkpoint in {re.escape(str(path))}", lines[-1])
    assert reached is not None and float(reached[1]) >= 95, lines[-1]
    assert path.stat().st_size > 1000


@pytest.mark.nightly("5 s of processor time for the example alone")
def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    path = tmp_path / "latest.pt"
    path.write_bytes(b"not a checkpoint")
    result = train(tmp_path, "--epochs", "1")
    assert result.returncode == 1, (result.returncode, result.stderr)
    assert result.stderr.startswith(f"digits.py: {path} is no checkpoint of this program")
    assert "--fresh" in result.stderr
    assert path.read_bytes() == b"not a checkpoint"


@pytest.mark.parametrize(
    "args", [["--epochs", "0"], ["--batch-size", "-1"], ["--min-accuracy", "95"], ["--epoch", "3"]]
)
def test_senseless_options_are_refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        load().parse_args(args)
    assert e.value.code == 2
    assert args[0] in capsys.readouterr().err


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_every_image_is_used_once_in_an_epoch_by_any_number_of_ranks(world_size: int) -> None:
    shares = load().shares
    ranks = [list(shares(1437, 64, seed=3, rank=rank, world_size=world_size)) for rank in range(world_size)]
    assert len({len(steps) for steps in ranks}) == 1, "DDP hangs when ranks take different numbers of steps"
    for step in zip(*ranks, strict=True):
        assert {size for _, size in step} == {sum(len(indices) for indices, _ in step)}
    assert sorted(int(i) for steps in ranks for indices, _ in steps for i in indices) == list(range(1437))


def load() -> ModuleType:
    if "digits_example" not in sys.modules:
        spec = importlib.util.spec_from_file_location("digits_example", SCRIPT)
        assert spec is not None and spec.loader is not None
        sys.modules["digits_example"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["digits_example"]
