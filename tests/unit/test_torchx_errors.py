# SPDX-License-Identifier: BSD-3-Clause
"""Which exceptions of the torchx command are explained, and which keep their traceback."""

from __future__ import annotations

import sys
from typing import NoReturn

import pytest
from docker.errors import DockerException
from torchx.cli import cmd_base, cmd_list, cmd_log, cmd_run
from torchx.cli.main import main
from torchx.specs.api import MalformedAppHandleException, UnknownSchedulerException

from torchx_monarch.backends.core.errors import MissingClientError
from torchx_monarch.cli import torchx_errors


@pytest.mark.parametrize(
    ("command", "error", "said"),
    [
        ("status a://b/c/d", MalformedAppHandleException("a://b/c/d"), "a://b/c/d is not of the form"),
        ("log monarch_locl://x/y", UnknownSchedulerException("monarch_locl"), "Did you mean monarch_local?"),
        (
            "run monarch.spmd a.py",
            DockerException("no daemon"),
            "local_docker, which TorchX uses without -s, has no",
        ),
        (
            "run monarch.spmd --script a.py -- --seed 1 -s x",
            DockerException("no daemon"),
            "has no Docker here: no daemon",
        ),
        ("--log_level INFO list", DockerException("no daemon"), "torchx monarch init"),
        ("run monarch.spmd a.py", ModuleNotFoundError("No module named 'docker'", name="docker"), "no Docker here"),
        ("run -s monarch_docker utils.echo", DockerException("no daemon"), ""),
        ("run --scheduler=kubernetes utils.echo", DockerException("no daemon"), ""),
        ("status local_docker://x/y", DockerException("no daemon"), ""),
        ("run monarch.spmd a.py", MissingClientError("pip install it"), "pip install it"),
        ("list", KeyboardInterrupt(), "interrupted"),
        ("run monarch.spmd a.py", ValueError("boom"), ""),
        ("run monarch.spmd a.py", ModuleNotFoundError("No module named 'x'", name="x"), ""),
        ("list", KeyError("x"), ""),
    ],
)
def test_explanations(command: str, error: BaseException, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> NoReturn:
        raise error

    for module in (cmd_base, cmd_list, cmd_log, cmd_run):
        monkeypatch.setattr(module, "get_runner", fail)
    monkeypatch.setattr(sys, "argv", ["torchx", *command.split()])
    with pytest.raises(type(error)) as caught:
        main(command.split())
    text = torchx_errors.explain(caught.value)
    assert said in text and bool(text) == bool(said)


def test_other_programs_keep_their_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "list"])
    assert torchx_errors.explain(KeyboardInterrupt()) == ""


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
