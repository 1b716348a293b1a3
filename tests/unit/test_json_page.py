# SPDX-License-Identifier: BSD-3-Clause
"""The documented JSON and exit codes of ``torchx monarch`` are those of the code, also if nobody takes the output."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import getpass
import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import pytest

from torchx_monarch.backends.core.backend import CheckResult
from torchx_monarch.backends.core.snapshot import AppSnapshot
from torchx_monarch.cli import exec as exec_command
from torchx_monarch.cli import exit_codes, main, top
from torchx_monarch.cli.debug import Breakpoint
from torchx_monarch.cli.jobs import JobFacts
from torchx_monarch.client.result import RankResult, RunInfo, RunResult
from torchx_monarch.insight import timeline
from torchx_monarch.insight.rank_sample import RankView
from torchx_monarch.insight.stacks import Frame, ProcessStacks, ThreadStack
from torchx_monarch.schedulers.job_status import JobStatus, LiveState, ReplicaState
from torchx_monarch.system.processes import user_name

_REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def documented(title: str) -> set[str]:
    """Return the fields in the table with this title: the heading before it, or the first cell of its head."""
    text = (_REFERENCE / "json.md").read_text()
    found = re.search(rf"(?:^## {title}\n.*?|The object `{title}`:\n\n)^\| field \|.*?\n\n", text + "\n\n", re.M | re.S)
    found = found or re.search(rf"^\| field of {title} \|.*?\n\n", text + "\n\n", re.M | re.S)
    assert found is not None, title
    rows = [line.split("|")[1] for line in found[0].splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def names(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def test_the_fields_of_records() -> None:
    kinds = {"live": LiveState, "a replica": ReplicaState, "a breakpoint": Breakpoint, "a process": ProcessStacks}
    assert {title: documented(title) for title in kinds} == {title: names(kind) for title, kind in kinds.items()}
    assert documented("a check") == names(CheckResult) | {"level"}


def test_the_fields_of_a_status() -> None:
    assert documented("status, ls, wait") == names(JobStatus) - {"summary"}
    line = next(line for line in (_REFERENCE / "json.md").read_text().splitlines() if line.startswith("| `phase`"))
    hidden = {"submit", "first output", "unknown"}  # phases of a report alone
    assert re.findall(r"`(\w+)`", line)[1:] == [phase for phase in timeline.PHASES if phase not in hidden]
    json.dumps(JobStatus("h", "n", "RUNNING").to_json())


def test_the_fields_of_runs(capsys: pytest.CaptureFixture[str]) -> None:
    rank = RankResult(0, 0, 0, "host", 1, 0, 1.0, False, "", "", "")
    exec_command.print_accepted("h", 1)
    assert json.loads(capsys.readouterr().out) == {"type": "accepted", "handle": "h", "run": 1}
    result = exec_command._to_json(RunResult(1, 0, "done", {0: rank}))
    assert documented("`result`") == {"type", "handle", *result}
    line = next(line for line in (_REFERENCE / "json.md").read_text().splitlines() if line.startswith("| `ranks` |"))
    assert set(re.findall(r"`(\w+)`", line)) - {"ranks"} == names(RankResult)
    assert [set(rank) for rank in result["ranks"]] == [names(RankResult)]
    assert documented("a run") == set(RunInfo.__annotations__)


def test_the_fields_of_stacks() -> None:
    line = next(line for line in (_REFERENCE / "json.md").read_text().splitlines() if line.startswith("| `threads`"))
    assert set(re.findall(r"`(\w+)`", line)) == {"threads", *names(ThreadStack), *names(Frame)}


def test_the_fields_of_top() -> None:
    status = JobStatus("h", "n", "RUNNING", activity=[RankView(0, 0, "host", 1, "running")])
    shown: Any = top.to_json(JobFacts(AppSnapshot("a", "a", []), status, timeline.build([], [], end=1.0)))
    assert documented("a look") == set(shown)


@pytest.mark.parametrize("name", sorted(main.SUB_COMMANDS.keys() - {"cancel", "delete", "mcp", "web"}))
def test_every_sub_command_has_json(name: str) -> None:
    parser = argparse.ArgumentParser()
    main.add_arguments(name, parser)
    assert any("--json" in action.option_strings for action in parser._actions)
    assert re.search(rf"^## .*\b{name}\b|^\| `{name}` \|", (_REFERENCE / "json.md").read_text(), re.M)


def test_the_exit_codes() -> None:
    section = (_REFERENCE / "exit_codes.md").read_text().partition("## torchx monarch\n")[2].partition("\n## ")[0]
    codes = {value for name, value in vars(exit_codes).items() if name.isupper()}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.M)} == codes | {0, 2}


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser(prog="torchx monarch")
    main.CmdMonarch().add_arguments(parser)
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(["--version"])
    assert caught.value.code == 0
    assert re.fullmatch(r"torchx-monarch \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


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


def test_a_locale_without_the_characters_of_a_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        @staticmethod
        def run(args: argparse.Namespace) -> None:
            print("ö █")

    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written := io.BytesIO(), encoding="latin-1"))
    monkeypatch.setattr(main, "load", lambda name: Module)
    main.CmdMonarch().run(argparse.Namespace(sub_command="ls"))
    assert written.getvalue() == b"\xf6 \\u2588\n"


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
