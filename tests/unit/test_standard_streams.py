# SPDX-License-Identifier: BSD-3-Clause
"""Output that cannot be written."""

from __future__ import annotations

import argparse
import getpass
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest

from torchx_monarch.cli import exit_codes, main
from torchx_monarch.cli.output import open_stderr
from torchx_monarch.system.processes import user_name


def full() -> TextIO:
    return open("/dev/full", "w")


def unread() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@contextmanager
def sub_command(monkeypatch: pytest.MonkeyPatch, stdout: TextIO, run: Callable[[], None]) -> Iterator[None]:
    """A sub-command `ls` that calls a function with this stdout."""

    class Module:
        @staticmethod
        def run(args: argparse.Namespace) -> None:
            run()

    with stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(main, "load", lambda name: Module)
        try:
            yield
        finally:
            monkeypatch.undo()


@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize(
    ("opened", "code", "said"),
    [
        (full, exit_codes.OUTPUT, "[monarch] cannot write the output: No space left on device\n"),
        (unread, exit_codes.BROKEN_PIPE, ""),
    ],
)
def test_output_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    opened: Callable[[], TextIO],
    code: int,
    said: str,
    flush: bool,
) -> None:
    with sub_command(monkeypatch, opened(), lambda: print("x", flush=flush)), pytest.raises(SystemExit) as ended:
        main.CmdMonarch().run(argparse.Namespace(sub_command="ls"))
    assert ended.value.code == code
    assert capsys.readouterr().err == said


def test_another_full_disk_keeps_its_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    def write() -> None:
        raise OSError(28, "No space left on device", "/state/job.json")

    with sub_command(monkeypatch, open(os.devnull, "w"), write), pytest.raises(OSError, match="job.json"):
        main.CmdMonarch().run(argparse.Namespace(sub_command="ls"))


def test_a_closed_stderr_does_not_print_to_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    open_stderr()
    with sys.stderr:
        print("progress", file=sys.stderr)
    assert capsys.readouterr().out == ""


def test_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def getuser() -> str:
        raise KeyError("getpwuid(): uid not found: 1000650000")

    monkeypatch.setattr(getpass, "getuser", getuser)
    assert user_name() == f"uid{os.getuid()}"
