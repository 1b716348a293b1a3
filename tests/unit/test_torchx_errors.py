# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which exceptions of the torchx command are explained, and which keep their traceback."""

from __future__ import annotations

import sys

import pytest
from docker.errors import DockerException
from torchx.specs.api import MalformedAppHandleException, UnknownSchedulerException

from torchx_monarch.cli import torchx_errors


@pytest.mark.parametrize(
    ("command", "error", "said"),
    [
        ("status train", MalformedAppHandleException("train"), "train is not of the form"),
        ("log monarch_locl://x/y", UnknownSchedulerException("monarch_locl"), "Did you mean monarch_local?"),
        (
            "run monarch.spmd a.py",
            DockerException("no daemon"),
            "uses local_docker, which has no Docker here: no daemon",
        ),
        ("list", DockerException("no daemon"), "torchx monarch init"),
        ("run monarch.spmd a.py", ModuleNotFoundError("No module named 'docker'", name="docker"), "no Docker here"),
        ("run -s local_docker utils.echo", DockerException("no daemon"), ""),
        ("run --scheduler=local_docker utils.echo", DockerException("no daemon"), ""),
        ("status local_docker://x/y", DockerException("no daemon"), ""),
        ("run monarch.spmd a.py", ValueError("boom"), ""),
        ("run monarch.spmd a.py", ModuleNotFoundError("No module named 'x'", name="x"), ""),
        ("list", KeyError("x"), ""),
    ],
)
def test_explanations(command: str, error: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["torchx", *command.split()]
    monkeypatch.setattr(sys, "argv", argv)
    text = torchx_errors.explain(error, argv)
    assert said in text and bool(text) == bool(said)


def test_other_programs_keep_their_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "list"])
    assert torchx_errors.explain(DockerException("no daemon"), ["train.py", "list"]) == ""


def test_the_hook_is_installed_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    torchx_errors.install()
    first = sys.excepthook
    torchx_errors.install()
    assert sys.excepthook is first is not sys.__excepthook__
    monkeypatch.setattr(sys, "argv", ["torchx", "status", "x"])
    error = MalformedAppHandleException("x")
    sys.excepthook(type(error), error, None)
    sys.excepthook(ValueError, ValueError("boom"), None)
    said = capsys.readouterr().err
    assert said.startswith("x is not of the form") and said.endswith("ValueError: boom\n")
