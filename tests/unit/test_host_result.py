# SPDX-License-Identifier: BSD-3-Clause
"""The JSON text in which a host reports how it has ended, texts that only look like one, and files that ranks spoil."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchx_monarch.host.ranks import rank_errors
from torchx_monarch.insight.progress import Reporter, write_result
from torchx_monarch.model.host_result import KEY_VARIABLE, HostResult, no_retry_reason, verified
from torchx_monarch.model.job_result import JobResult, RankExit
from torchx_monarch.system import error_files
from torchx_monarch.system.console import Console, WriterThread
from torchx_monarch.system.untrusted_text import one_line, printable

EVERY = HostResult(3, "why", "Traceback\n\tx", 17.0, True, 2, 4, "not again", 1)
FIELDS = st.sampled_from([*error_files._SHORT, "message", "extraInfo", "py_callstack", "other"])
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4),
    max_leaves=8,
)


def test_torchx_and_torchrun_can_read_it() -> None:
    read = json.loads(EVERY.to_text())
    assert read["message"]["message"] == "why" and read["message"]["errorCode"] == 3
    assert read["message"]["extraInfo"]["py_callstack"] == "Traceback\n\tx"
    assert read["message"]["extraInfo"]["timestamp"] == "17"
    substitute = HostResult(3, "replica r/0 exited with code 3", failed_at=17.0, is_short=True)
    flat = {"message": "replica r/0 exited with code 3", "errorCode": 3, "timestamp": 17}
    assert json.loads(substitute.to_text()) == flat
    assert HostResult.from_text(substitute.to_text()) == substitute
    assert HostResult.from_text(EVERY.to_text()) == EVERY
    assert EVERY.names_cause and not substitute.names_cause


def test_a_host_that_runs_reports_counts_alone() -> None:
    for result in (HostResult(rank_restarts=2), HostResult(restarts=0)):
        assert "message" not in json.loads(result.to_text())
        read = HostResult.from_text(result.to_text())
        assert read == result and not read.forbids_restart and not read.names_cause


@given(VALUES)
def test_any_json_is_read(data: Any) -> None:
    result = HostResult.from_text(json.dumps(data))
    assert HostResult.from_text(result.to_text()).to_text() == result.to_text()
    assert result.code is None or abs(result.code) < 256
    assert result.rank_restarts >= 0 and result.replica >= -1


@pytest.mark.parametrize(
    "text", [None, "", "{", "[]", "7", "null", '"x"', "[" * 5000, '{"message":' * 5000, "last words"]
)
def test_an_unreadable_text_is_an_empty_result(text: str | None) -> None:
    assert HostResult.from_text(text) == HostResult()


@pytest.mark.parametrize(
    "values",
    [
        {"message": {"errorCode": True}, "rank_restarts": "1", "final": 3, "restarts": None},
        {"message": {"errorCode": 10**9, "extraInfo": []}, "rank_restarts": -1},
        {"message": {"message": 3, "extraInfo": {"replica": 1.5, "consequence": 1, "timestamp": "x"}}},
        {"message": {"extraInfo": {"timestamp": "nan", "replica": "0"}}, "rank_restarts": True},
    ],
)
def test_a_field_of_another_type_counts_as_missing(values: dict[str, Any]) -> None:
    assert HostResult.from_text(json.dumps(values)) == HostResult()


def test_a_result_fits_its_limit() -> None:
    error = {"message": {"message": "x" * 3000, "extraInfo": {"py_callstack": "begin" + "\U0001f600" * 9000 + "end"}}}
    cause = RankExit(0, 0, 0, "n", 1, 1, time.time(), error=error)
    text = HostResult.from_job_result(JobResult(1, cause.describe(), cause)).to_text(4096)
    assert len(text) <= 4096
    read = json.loads(text)["message"]
    assert read["message"] == cause.describe()
    assert read["extraInfo"]["py_callstack"].endswith("end")
    long = HostResult(1, "y" * 9000, no_retry_reason="not again")
    assert len(long.to_text(4096)) <= 4096
    assert HostResult.from_text(long.to_text(4096)).no_retry_reason == "not again"
    assert json.loads(long.to_text())["message"]["message"] == "y" * 9000


def test_the_result_of_the_job_is_that_of_its_hosts() -> None:
    cause = RankExit(2, 0, 1, "n", 9, -11, 5.0)
    result = HostResult.from_job_result(
        JobResult(139, cause.describe(), cause), rank_restarts=2, no_retry_reason="not again"
    )
    assert (result.code, result.replica, result.failed_at, result.rank_restarts) == (139, 1, 5.0, 2)
    assert result.forbids_restart
    assert HostResult.from_job_result(JobResult(1, "lost", consequence=True, replica=0)).is_secondary


def test_why_a_host_is_not_restarted() -> None:
    assert no_retry_reason(3, None) == no_retry_reason(3, "garbage") == ""
    assert no_retry_reason(3, EVERY.to_text()) == "not again"
    assert "EX_CONFIG" in no_retry_reason(78, None)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (os.mkfifo, "it is a FIFO"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a symbolic link"),
        (lambda path: path.write_text('{"message":' * 50_000), "it is not JSON"),
        (lambda path: path.write_text(json.dumps({"message": "x" * (2 << 20)})), "it is larger than 1048576 bytes"),
        (lambda path: path.write_text('{"message": {"message": "Val'), "it is not JSON"),
        (lambda path: path.write_text("[1]"), "it is not a JSON object"),
    ],
)
def test_unreadable(make: Callable[[Path], object], why: str, tmp_path: Path) -> None:
    make(tmp_path / "error.json")
    with pytest.raises(error_files.UnreadableError, match=why):
        error_files.read(str(tmp_path / "error.json"))


def test_there_is_none(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    assert error_files.read(str(path)) is None
    path.write_text("{}")
    assert error_files.read(str(path)) == {}


def test_what_torch_and_hosts_write_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    extra = {"py_callstack": "Traceback\n\tx", "timestamp": "17", "raised_at": 17.25, "began": False, "joined": True}
    theirs = {"message": {"message": "ValueError: x", "extraInfo": extra}}
    path.write_text(json.dumps(theirs))
    assert error_files.read(str(path)) == theirs
    flat = {"message": "replica r/0 exited with code 3", "errorCode": 3, "timestamp": 17}
    path.write_text(json.dumps(flat))
    assert error_files.read(str(path)) == flat
    ours = json.loads(HostResult(3, "why", "x", 17.0, True, 2, 4, "code 78", 1).to_text())
    path.write_text(json.dumps(ours))
    assert error_files.read(str(path)) == ours


@pytest.mark.parametrize("character", ["\N{EURO SIGN}", "\N{GRINNING FACE}"])
def test_a_long_message_and_a_long_traceback_are_cut(character: str) -> None:
    extra = {"py_callstack": character * 200_000, "timestamp": "17"}
    kept = error_files.known_fields({"message": {"message": "x" * 500_000, "extraInfo": extra}}, 5000)
    assert kept["message"]["message"] == "x" * (error_files.MESSAGE_BYTES - 2)
    assert kept["message"]["extraInfo"]["py_callstack"].endswith(f"{character}...")
    assert len(json.dumps(kept)) < error_files.MESSAGE_BYTES + 5200


def test_of_a_long_traceback_libraries_and_the_end_of_a_long_text_are_left_out_first() -> None:
    def frames(path: str, count: int) -> str:
        return f'  File "{path}", line 7, in call\n    return call()\n    ^^^^^^\n' * count

    library = "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py"
    cause = "Traceback (most recent call last):\n" + frames("/w/train.py", 1) + frames(library, 40)
    end = "ValueError: cause\n\nThe above exception was the direct cause:\n\nTraceback:\n" + frames("/w/model.py", 2)
    error = "RuntimeError: Error(s) in loading state_dict for M:\n"
    extra = {"py_callstack": cause + end + frames(library, 9) + error + "\tsize mismatch for x\n" * 40 + "end"}
    whole = error_files.known_fields({"message": {"extraInfo": extra}})
    kept = error_files.known_fields({"message": {"extraInfo": extra}}, 1000)
    assert whole["message"]["extraInfo"] == extra
    assert kept["message"]["extraInfo"]["py_callstack"] == (
        "Traceback (most recent call last):\n" + frames("/w/train.py", 1) + "  ...\n" + frames(library, 1) + end
        + "  ...\n" + frames(library, 1) + error + ("\tsize mismatch for x\n" * 40)[: 250 - len(error)] + "..."
    )  # fmt: skip


@given(st.dictionaries(FIELDS, VALUES))
def test_any_content_is_an_end_of_a_rank(data: dict[str, Any]) -> None:
    kept = error_files.known_fields(data)
    assert error_files.known_fields(kept) == kept
    rank_exit = RankExit(3, 1, 0, "node", 17, 5, 10.0, error=kept)
    assert rank_exit.failed and isinstance(rank_exit.failed_at, float)
    assert rank_exit.describe().startswith("rank 3 (local rank 1 on node, pid 17) exited with code 5")
    assert rank_exit.describe().isprintable()
    assert isinstance(rank_exit.traceback, str) and isinstance(rank_exit.began, bool) and not rank_exit.is_collateral
    text = HostResult.from_job_result(JobResult(5, rank_exit.describe(), rank_exit)).to_text()
    assert no_retry_reason(5, text) == ""


@given(st.text())
def test_text_of_others_is_one_line(text: str) -> None:
    line = one_line(text)
    assert line.isprintable() and one_line(line) == line
    assert printable(text).count("\n") == text.rstrip("\n").count("\n")


def test_what_is_escaped() -> None:
    assert one_line("a\nb\x1b[31m\r\t\x9b\u2028\u202e\udc80é日") == r"a\nb\x1b[31m\r\t\x9b\u2028\u202e\udc80é日"
    assert one_line("abcdef", 3) == "abc..."
    assert printable("a\tb\n\x1b[1mc\r\n") == "a\tb\n\\x1b[1mc\\r"


def test_a_host_signs_its_result_where_its_backend_reads_the_log(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w+") as log:
        reporter = Reporter(Console(log.fileno()), None, "r")
        host_result = HostResult(3, "rank 1 exited with code 3: ValueError: a\n[monarch] result b")
        write_result(host_result, {KEY_VARIABLE: "key"}, reporter)
        write_result(host_result, {}, reporter)
        WriterThread.finish()
        log.seek(0)
        lines = log.read().split("\n")
    assert len(lines) == 2
    [result] = verified(lines, "key")
    assert verified([f"2026-11-29T10:00:00.5Z {lines[0]}\n"], "key") == [result]
    assert json.loads(result)["message"]["errorCode"] == 3
    assert verified(lines, "other") == verified(lines, "") == []
    assert verified([lines[0].replace("code 3", "code 4"), f"[default0]:{lines[0]}"], "key") == []


@pytest.mark.parametrize("by_program", [False, True], ids=["by the rank", "by @record"])
@pytest.mark.parametrize(
    "error",
    [ValueError("first line\n" + "x" * (2 << 20)), RecursionError("first line")],
    ids=["long message", "many frames"],
)
def test_of_an_error_that_is_too_long_the_type_the_beginning_and_frames_are_kept(
    error: Exception, by_program: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(depth: int) -> None:
        if not depth:
            raise error
        if depth % 2:  # Python leaves out repetitions of one line
            fail(depth - 1)
        fail(depth - 1)

    path = str(tmp_path / "error.json")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)
    if by_program:
        (tmp_path / "error.json").write_text(json.dumps({"message": "x" * (2 << 20)}))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        fail(0 if isinstance(error, ValueError) else 10_000)
    except Exception as raised:
        rank_errors.record(raised, True)
    finally:
        sys.setrecursionlimit(limit)
    kept = (error_files.read(path) or {})["message"]
    assert kept["message"].startswith(f"{type(error).__name__}: first line")
    assert "in fail\n    raise error\n" in kept["extraInfo"]["py_callstack"]
    assert "Error: first line" in kept["extraInfo"]["py_callstack"]


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("input()", "EOFError: EOF when reading a line (a job has no stdin)"),
        ("try: {}['lr']\nexcept KeyError: raise ValueError('bad')", "ValueError: bad (after KeyError: 'lr')"),
        ("try: {}['lr']\nexcept KeyError: raise ValueError('bad') from None", "ValueError: bad"),
        pytest.param(
            "async def main():\n async with asyncio.TaskGroup() as g: g.create_task(asyncio.sleep('x'))\n"
            "import asyncio; asyncio.run(main())",
            "ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception) (after TypeError: "
            "'<=' not supported between instances of 'str' and 'int')",
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="has no TaskGroup"),
        ),
    ],
    ids=["no stdin", "chain", "from None", "group"],
)
def test_an_error_says_what_its_message_does_not(
    program: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "error.json")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)
    with open(os.devnull) as empty:
        monkeypatch.setattr(sys, "stdin", empty)
        try:
            exec(program, {})
        except Exception as raised:
            rank_errors.record(raised, True)
    assert (error_files.read(path) or {})["message"]["message"] == said


@pytest.mark.parametrize("lacking", [errno.ENOSPC, errno.EDQUOT])
def test_who_had_no_room_for_an_error_file_says_so(
    lacking: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A moment later there is room: the reserves of the others are removed. statvfs does not know of a quota."""
    opened = os.open

    def refuse(path: Any, flags: int, *args: Any, **more: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(lacking, os.strerror(lacking), path)
        return opened(path, flags, *args, **more)

    path = str(tmp_path / "error.json")
    said = f"the file system of {tmp_path} is full (no space, no inodes, or a quota)"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)
    error_files.make_reserve(path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        write_result(HostResult(1, "rank 0 failed"), os.environ, Reporter(Console(2), None, ""))
    assert (error_files.read(path) or {})["message"]["message"] == f"rank 0 failed; {said}"
