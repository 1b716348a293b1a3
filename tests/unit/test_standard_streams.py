# SPDX-License-Identifier: BSD-3-Clause
"""Output that cannot be written."""

from __future__ import annotations

import argparse
import errno
import getpass
import os
import sys
from collections.abc import Callable
from typing import TextIO

import pytest

from torchx_monarch.cli import exit_codes, main
from torchx_monarch.system.processes import user_name


def unread() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize(
    ("opened", "code", "said"),
    [
        (
            lambda: open("/dev/full", "w"),  # noqa: SIM115
            exit_codes.OUTPUT,
            "[monarch] cannot write the output: No space left on device\n",
        ),
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
    class Module:
        @staticmethod
        def run(args: argparse.Namespace) -> None:
            print("x", flush=flush)

    with opened() as stdout, pytest.raises(SystemExit) as ended:
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(main, "load", lambda name: Module)
        main.CmdMonarch().run(argparse.Namespace(sub_command="ls"))
    assert ended.value.code == code
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("error", [TimeoutError("timed out"), OSError(errno.EMFILE, "Too many open files")])
def test_other_errors_are_none_of_the_output(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    class Module:
        @staticmethod
        def run(args: argparse.Namespace) -> None:
            raise error

    monkeypatch.setattr(main, "load", lambda name: Module)
    with pytest.raises(type(error)):
        main.CmdMonarch().run(argparse.Namespace(sub_command="ls"))


def test_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def getuser() -> str:
        raise KeyError("getpwuid(): uid not found: 1000650000")

    monkeypatch.setattr(getpass, "getuser", getuser)
    assert user_name() == f"uid{os.getuid()}"
