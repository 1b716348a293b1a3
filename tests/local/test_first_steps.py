# SPDX-License-Identifier: BSD-3-Clause
"""The mistakes of a first day, on every backend: a few lines that say what to type, and no traceback.

A wrong option, a wrong file, a wrong handle, no ``-s``, and no cluster: each command is a process of its own, as a
person starts it, in a folder with one script and without the daemon of any backend.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fork_server import run_torchx

BACKENDS = ("monarch_local", "monarch_docker", "monarch_kubernetes", "monarch_slurm", "monarch_aws_batch")

REMOTE = BACKENDS[1:]

LONGEST = 12
"""Lines that an answer may have: half of a terminal."""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    path = tmp_path / "work"
    path.mkdir()
    (path / "train.py").write_text("print('trained')\n")
    return path


def answer(work: Path, *words: str, apps: int = 0) -> str:
    """What ``torchx WORDS`` prints.

    The test fails if the command succeeds, prints much or a traceback, or leaves another number of apps than ``apps``.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "KUBE", "TORCHX"))}
    env |= {
        "HOME": str(work.parent),
        "DOCKER_HOST": "unix:///nonexistent",
        "KUBECONFIG": "/nonexistent",
        "PATH": os.path.dirname(sys.executable),  # a machine without Slurm's commands
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    done = run_torchx(*words, cwd=work, env=env, seconds=120, merged=True)
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stdout and 'File "' not in done.stdout, done.stdout
    assert 0 < len(done.stdout.splitlines()) <= LONGEST, done.stdout
    assert len(list(Path(os.environ["MONARCH_STATE_DIR"]).glob("apps/*"))) == apps
    return done.stdout


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrong_run_option(work: Path, backend: str) -> None:
    said = "Unknown run option `grase`. Did you mean grace?"
    assert said in answer(work, "run", "-s", backend, "-cfg", "grase=5", "monarch.spmd", "train.py")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("monarch.spmd --nprocs 4 train.py", "no option --nprocs. Did you mean --nproc?"),
        (
            "monarch.spmd --workspace . train.py",
            "--workspace is an option of `torchx run`: type it before monarch.spmd",
        ),
        ("monarch.smpd train.py", "no component monarch.smpd. Did you mean monarch.spmd?"),
    ],
)
def test_a_wrong_option(work: Path, words: str, said: str) -> None:
    assert said in answer(work, "run", "-s", "monarch_local", *words.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("monarch.spmd trian.py --lr 1", "there is no file trian.py in {work}. Did you mean train.py?"),
        (
            "monarch.spmd --nproc 2 --script src/train.py",
            "there is no file {work}/src/train.py: {work}/src: No such file",
        ),
        ("monarch.controller trian.py", "Did you mean train.py?"),
        ("train.py --lr 1", "train.py is no component. To run a script: torchx run monarch.spmd --nproc 4 train.py"),
        ("monarch.spmd", "No program to run: give a script"),
    ],
)
def test_a_wrong_file(work: Path, words: str, said: str) -> None:
    assert said.format(work=work) in answer(work, "run", "-s", "monarch_local", *words.split())


@pytest.mark.parametrize("command", ["status", "log", "cancel", "describe", "delete"])
@pytest.mark.parametrize(
    ("handle", "said"),
    [
        ("monarch_local://torchx/train-x1", "there is no app 'train-x1' of monarch_local"),
        ("monrach_local://torchx/train-x1", "Did you mean monarch_local?"),
        ("train-x1", "there is no app 'train-x1'; `torchx monarch ls` lists all"),
    ],
)
def test_a_wrong_handle(work: Path, command: str, handle: str, said: str) -> None:
    assert said in answer(work, command, handle)


def test_a_handle_that_is_nearly_right(work: Path) -> None:
    submit = [sys.executable, "-m", "torchx.cli.main", "run", "-s", "monarch_local", "--wait", "utils.echo"]
    right = subprocess.run(submit, cwd=work, capture_output=True, text=True, timeout=120, check=True).stdout.strip()
    assert f"did you mean {right}?" in answer(work, "status", f"{right[:-2]}zz", apps=1)
    said = answer(work, "status", f"{right.rpartition('/')[2][:-2]}zz", apps=1)
    assert "similar ones:" in said and right in said


@pytest.mark.parametrize("words", ["run monarch.spmd --nproc 4 train.py", "list"])
def test_no_scheduler(work: Path, words: str) -> None:
    said = answer(work, *words.split())
    assert "local_docker, which TorchX uses without -s, has no Docker here" in said
    assert "-s monarch_local" in said and "torchx monarch init" in said


def test_a_wrong_scheduler(work: Path) -> None:
    said = answer(work, "run", "-s", "monrach_local", "monarch.spmd", "train.py")
    assert "there is no scheduler monrach_local. Did you mean monarch_local?" in said


@pytest.mark.parametrize("backend", REMOTE)
@pytest.mark.parametrize(
    "words", ["run {cfg} monarch.spmd --image i train.py", "list", "status {handle}", "log {handle}/train/0"]
)
def test_no_cluster(work: Path, backend: str, words: str) -> None:
    cfg = "-cfg queue=q" if backend == "monarch_aws_batch" else ""
    app = "1" if backend == "monarch_slurm" else "q:1"
    command, *rest = words.format(cfg=cfg, handle=f"{backend}://torchx/{app}").split()
    where = ["-s", backend] if command in ("run", "list") else []
    said = answer(work, command, *where, *rest)
    assert any(name in said for name in ("Docker", "Kubernetes", "Slurm", "AWS")), said


def test_a_configuration_that_cannot_be_read(work: Path) -> None:
    (work / ".torchxconfig").write_text("scheduler = monarch_local\n")
    assert "TorchX cannot read a .torchxconfig" in answer(
        work, "run", "-s", "monarch_local", "monarch.spmd", "train.py"
    )
