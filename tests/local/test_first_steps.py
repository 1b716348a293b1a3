# SPDX-License-Identifier: BSD-3-Clause
"""A first day: the program of the tutorial, and mistakes, answered by a few lines that say what to type.

Each command is a process of its own, as a person starts it, in a folder with one script and without the daemon of any
backend.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.fork_server import run_torchx

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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run -s monarch_local monarch.spmd --nprocs 4 train.py", "no option --nprocs. Did you mean --nproc?"),
        ("cancel monarch_local://torchx/train-x1", "there is no app 'monarch_local://torchx/train-x1'"),
    ],
)
def test_a_mistake(work: Path, words: str, said: str) -> None:
    """``tests/unit/test_mistakes.py`` has all, without a process for each."""
    assert said.format(work=work) in answer(work, *words.split())


def test_a_handle_that_is_nearly_right(work: Path) -> None:
    right = run_torchx("run", "-s", "monarch_local", "--wait", "utils.echo", cwd=work, check=True).stdout.strip()
    said = answer(work, "status", f"{right.rpartition('/')[2][:-2]}ee", apps=1)  # no id has a vowel
    assert "similar ones:" in said and right in said


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("monarch_docker", "run monarch.spmd --image i train.py"),
        ("monarch_docker", "status {handle}"),
        ("monarch_kubernetes", "run monarch.spmd --image i train.py"),
        ("monarch_kubernetes", "log {handle}/train/0"),
        ("monarch_slurm", "run monarch.spmd --image i train.py"),
        ("monarch_slurm", "list"),
        ("monarch_aws_batch", "run -cfg queue=q monarch.spmd --image i train.py"),
        ("monarch_aws_batch", "status {handle}"),
    ],
)
def test_no_cluster(work: Path, backend: str, words: str) -> None:
    app = "1" if backend == "monarch_slurm" else "q:1"
    command, *rest = words.format(handle=f"{backend}://torchx/{app}").split()
    where = ["-s", backend] if command in ("run", "list") else []
    said = answer(work, command, *where, *rest)
    assert any(name in said for name in ("Docker", "Kubernetes", "Slurm", "AWS")), said


_SHOWN = r"^```sh\n(torchx run [^\n]*)\n```\n(?:(?!```).)*?```text\n(.*?)^```"
"""A block with one command, and the next one if that shows what it prints."""

_PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()


def normal(text: str) -> str:
    """Return a line without what differs between runs: numbers, the app's id, folders."""
    text = re.sub(r"\S*/torchx-monarch/apps/|\S*/apps/(?=train-)", "STATE/", text)
    text = re.sub(r"\S*/(?=train\.py)", "", re.sub(r"\btrain-\w+", "ID", text))
    return re.sub(r"\d+(\.\d+)?", "N", text).strip()


def test_its_commands_show_what_it_shows(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", _PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    shown = re.findall(_SHOWN, _PAGE, re.MULTILINE | re.DOTALL)
    assert len(shown) == 2
    for (command, lines), code in zip(shown, (0, 1), strict=True):
        ran = run_torchx(*shlex.split(command)[1:], cwd=tmp_path)
        assert ran.returncode == code, ran.stderr
        printed = {normal(line) for line in (ran.stdout + ran.stderr).splitlines()}
        assert {normal(line) for line in lines.splitlines() if line != "…"} <= printed
