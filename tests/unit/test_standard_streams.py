# SPDX-License-Identifier: BSD-3-Clause
"""Output that cannot be written, input that counts as given to a command, and numbers that are too large."""

from __future__ import annotations

import argparse
import getpass
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import pytest

from torchx_monarch.cli import exit_codes, logs, main, top
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


@pytest.mark.parametrize(
    ("module", "words", "name", "value"),
    [
        (logs, "H -n 99999999999999999999", "tail", 10**9),
        (top, "H --interval 1e20", "interval", 86400),
        (top, "H --interval nan", "interval", 0.5),
    ],
)
def test_large_numbers(module: Any, words: str, name: str, value: object) -> None:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    assert getattr(parser.parse_args(words.split()), name) == value


def test_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def getuser() -> str:
        raise KeyError("getpwuid(): uid not found: 1000650000")

    monkeypatch.setattr(getpass, "getuser", getuser)
    assert user_name() == f"uid{os.getuid()}"


ASK = [sys.executable, "-c", "from torchx_monarch.schedulers.foreground import *; print(has_unread_input())"]


def asked(shell: str, folder: Path, **more: object) -> list[str]:
    """Return what the command says that the shell runs as "$@" once, or more often."""
    command = ["sh", "-c", shell, "sh", *ASK]
    more.setdefault("stdin", subprocess.DEVNULL)
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, timeout=60, check=True, **more)  # type: ignore[call-overload]
    return str(done.stdout).split()


@pytest.mark.parametrize(
    ("shell", "said"),
    [
        ('"$@"', "False"),  # /dev/null
        ('"$@" <&-', "False"),
        ('"$@" < content; :', "True"),
        ('"$@" < empty; :', "False"),
        ('{ echo one; sleep 0.1; } | { "$@"; :; }', "False"),  # of a group of commands, not of this one alone
        ('(sleep 1) | "$@"', "False"),  # it may never end, and is not waited for
        ("""while read line; do "$@"; done < content""", "False False"),
        ("""printf '"$@"\\n:\\n' > script; sh -s "$@" < script""", "False"),
        ("""printf '"$@"\\n:\\n' | sh -s "$@\"""", "False"),
    ],
)
def test_what_a_shell_gives(shell: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "content").write_text("one\ntwo\n")
    (tmp_path / "empty").touch()
    assert asked(shell, tmp_path) == said.split()


def test_a_pipe_with_content(tmp_path: Path) -> None:
    # The command begins when the writer has written.
    shell = 'echo content | { sleep 0.5; exec "$@"; }'
    assert asked(shell, tmp_path) == ["True"]


def test_a_program_that_calls_the_command_gives_it_input() -> None:
    with subprocess.Popen(ASK, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        process.stdin.write("content")
        process.stdin.flush()
        assert process.communicate(timeout=60)[0].split() == ["True"]


def test_a_script_has_what_its_runner_gives_it(tmp_path: Path) -> None:
    # As cron and CI runners do: the commands of a script inherit its standard input.
    assert asked('"$@"; :', tmp_path, stdin=None, input="content") == ["False"]
