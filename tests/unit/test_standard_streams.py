# SPDX-License-Identifier: BSD-3-Clause
"""Output that nobody reads."""

from __future__ import annotations

import argparse
import getpass
import os
import sys

import pytest

from torchx_monarch.cli import exit_codes, main
from torchx_monarch.system.processes import user_name


@pytest.mark.parametrize("flush", [True, False])
def test_output_that_nobody_reads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flush: bool
) -> None:
    class Module:
        @staticmethod
        def run(args: argparse.Namespace) -> None:
            print("x", flush=flush)

    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout, pytest.raises(SystemExit) as ended:
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(main, "load", lambda name: Module)
        main.CmdMonarch().run(argparse.Namespace(sub_command="ls"))
    assert ended.value.code == exit_codes.BROKEN_PIPE
    assert capsys.readouterr().err == ""


def test_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def getuser() -> str:
        raise KeyError("getpwuid(): uid not found: 1000650000")

    monkeypatch.setattr(getpass, "getuser", getuser)
    assert user_name() == f"uid{os.getuid()}"
