# SPDX-License-Identifier: BSD-3-Clause
"""Pipes to logs, the index of times beside a log, and several logs in the order of time."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import math
import os
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchx.specs import AppDef, Role

from tests.waits import WITHIN
from torchx_monarch.backends.core.snapshot import AppSnapshot, LogQuery, ReplicaSnapshot, RoleSnapshot, TimedLines
from torchx_monarch.cli import logs
from torchx_monarch.cli.logs import LogMerge
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.model.state import State
from torchx_monarch.supervisor import log_files, log_reader
from torchx_monarch.system import safe_files
from torchx_monarch.system.line_output import CONTINUED, lines_of

ROLE = Role("r", "image", entrypoint="torchrun", args=["--role=r", "--tee=3", "--nproc-per-node=2", "x.py"])
APP = AppSnapshot(
    "a",
    "a",
    [RoleSnapshot(RoleSpec("r"), [ReplicaSnapshot("r", 0, State.SUCCEEDED)])],
    AppDef("a", [ROLE]),
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(now=1000.0)
    made.time = made.monotonic = lambda: made.now
    monkeypatch.setattr(log_files, "time", made)
    return made


def read(folder: Path, stream: str = "", since: float | None = None, until: float | None = None) -> list[str]:
    return [text for lines in read_timed(folder, stream, since, until) for text in lines_of(lines.text)]


def read_timed(
    folder: Path, stream: str = "", since: float | None = None, until: float | None = None, tail: int = 0
) -> list[TimedLines]:
    return list(
        log_reader.lines(
            str(folder),
            LogQuery[AppSnapshot](
                since=None if since is None else datetime.fromtimestamp(since),
                until=None if until is None else datetime.fromtimestamp(until),
                stream=stream,
                tail=tail,
            ),
        )
    )


def test_lines_have_the_time_at_which_they_began(tmp_path: Path, clock: SimpleNamespace) -> None:
    out = log_files.ReplicaLog(str(tmp_path))
    for n in range(10):
        out.feed("stdout", f"start {n}".encode())
        clock.now += log_files.PATIENCE
        out.flush_old(clock.now)
        clock.now += 1 - log_files.PATIENCE
        out.feed("stdout", f" end {n}\nwhole {n}\n".encode())
        clock.now += 1
    out.close()
    # Line "start n" began at 1000.2 + 2n, line "whole n" at 1001 + 2n: but the latter came in one piece with an end.
    assert read(tmp_path, "stdout", since=1004.0, until=1006.0) == ["start 2 end 2\n", "whole 2\n"]
    assert read(tmp_path, "stdout", since=1018.1) == ["start 9 end 9\n", "whole 9\n"]
    assert read(tmp_path, "stdout", until=1000.0) == []
    assert read(tmp_path, "stdout", since=5000.0) == []
    assert len(read(tmp_path, "stdout", until=5000.0)) == 20


def test_lines_are_read_with_their_times(tmp_path: Path, clock: SimpleNamespace) -> None:
    out = log_files.ReplicaLog(str(tmp_path))
    for n in range(5000):
        out.feed("stdout", f"line {n}\n".encode())
        clock.now += 1
    out.feed("stdout", b"unfinished")
    out.close()
    assert [line[:2] for line in read_timed(tmp_path, "stdout", since=5990.0)] == [
        *((1000.0 + n, f"line {n}\n") for n in range(4990, 5000)),
        (6000.0, "unfinished"),
    ]
    assert [line.time for line in read_timed(tmp_path)] == [1000.0 + n for n in range(5001)]
    for damaged in (math.nan, math.inf, -math.inf, 1e300, -1e300, 1e12):
        (tmp_path / log_files.INDEX).write_bytes(log_files.RECORD.pack(0, damaged, 1))
        assert {line.time for line in read_timed(tmp_path, "stdout")} == {0.0}
    (tmp_path / log_files.INDEX).unlink()
    assert {line.time for line in read_timed(tmp_path, "stdout")} == {0.0}


@given(st.lists(st.integers(0, 200_000), max_size=8), st.booleans(), st.integers(1, 10))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_last_lines_of_a_log(tmp_path: Path, lengths: list[int], is_ended: bool, tail: int) -> None:
    lines = [f"{n}{'x' * length}\n" for n, length in enumerate(lengths)]
    if lines and not is_ended:
        lines[-1] = lines[-1][:-1]
    (tmp_path / "combined.log").write_text("".join(lines))
    assert lines_of("".join(found.text for found in read_timed(tmp_path, tail=tail)))[-tail:] == lines[-tail:]


@given(
    st.lists(
        st.tuples(st.sampled_from(["stdout", "stderr"]), st.text("ab\r\n", max_size=20).map(str.encode)), max_size=30
    )
)
def test_nothing_is_lost_or_mixed(tmp_path_factory: pytest.TempPathFactory, pieces: list[tuple[str, bytes]]) -> None:
    folder = tmp_path_factory.mktemp("logs")
    out = log_files.ReplicaLog(str(folder))
    for stream, data in pieces:
        out.feed(stream, data)
    out.close()
    whole = {s: b"".join(data for stream, data in pieces if stream == s) for s in ("stdout", "stderr")}
    for stream, data in whole.items():
        text = "".join(read(folder, stream)).encode()
        assert text.replace(CONTINUED, b"").replace(b"\n", b"") == data.replace(CONTINUED, b"").replace(b"\n", b"")
    combined = (folder / "combined.log").read_bytes()
    ends = [data for data in whole.values() if data and not data.endswith(b"\n")]
    assert sorted(combined.removesuffix(b"\n").split(b"\n")) == sorted(
        line for data in whole.values() if data for line in data.removesuffix(b"\n").split(b"\n")
    ) or not any(whole.values())
    assert len(ends) < 3


def test_unfinished_lines(tmp_path: Path, clock: SimpleNamespace) -> None:
    out = log_files.ReplicaLog(str(tmp_path))
    combined = tmp_path / "combined.log"
    assert out.flush_old(clock.now) == math.inf
    out.feed("stdout", b"10%")
    assert out.flush_old(clock.now) == 1000.0 + log_files.PATIENCE
    clock.now += log_files.PATIENCE / 2
    out.feed("stdout", b" 20%")
    out.flush_old(clock.now)
    assert combined.read_bytes() == b""
    clock.now += log_files.PATIENCE / 2 + 0.01
    out.flush_old(clock.now)
    assert combined.read_bytes() == b"10% 20%"
    assert out.flush_old(clock.now) == math.inf
    out.feed("stdout", b" 30%\n")
    out.feed("stderr", b"half")
    out.say("one\ntwo")
    out.feed("stderr", b" rest\n")
    out.close()
    assert combined.read_bytes() == b"10% 20% 30%\nhalf\n[monarch] one\n[monarch] two\n[continued]  rest\n"
    assert read(tmp_path, "stdout") == ["10% 20% 30%\n"]
    assert read(tmp_path, "stderr") == ["half\n", "[monarch] one\n", "[monarch] two\n", "[continued]  rest\n"]


def test_logs_that_cannot_be_opened(tmp_path: Path) -> None:
    out = log_files.ReplicaLog(str(tmp_path / "none"))
    out.feed("stdout", b"x\n")
    out.say("y")
    out.close()
    assert out.lost == 2 + len("[monarch] y\n") and out.reason == "No such file or directory"


def test_a_log_on_a_full_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = safe_files.open_file
    monkeypatch.setattr(
        safe_files,
        "open_file",
        lambda path, *flags, **more: (
            os.open("/dev/full", *flags) if path.endswith("combined.log") and flags else opened(path, *flags, **more)
        ),
    )
    out = log_files.ReplicaLog(str(tmp_path))
    out.feed("stdout", b"x" * 100 + b"\n")
    out.feed("stderr", b"fine\n")
    out.close()
    assert (out.lost, out.reason) == (106, "No space left on device")


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """RLIMIT_FSIZE, in a process of its own: part of a write may fit, also into the index."""
    import subprocess
    import sys

    code = """
import resource, sys
from torchx_monarch.supervisor import log_files

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

limit(log_files.RECORD.size * 5 // 2)
out = log_files.ReplicaLog(sys.argv[1])
out.feed("stdout", b"a\\n")
out.feed("stderr", b"b\\n")
out.feed("stdout", b"c\\n")
limit(150)
out.feed("stderr", b"d\\n")
out.feed("stdout", b"x" * 99 + b"\\n")
out.feed("stdout", b"y" * 99 + b"\\n")
print(out.lost, out.reason)
out.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, timeout=WITHIN
    )
    assert done.stdout == "58 File too large\n"
    assert (tmp_path / "combined.log").stat().st_size == 150
    assert read(tmp_path, "stderr") == ["b\n", "c\n", "d\n"]  # the stream of c is not known


@given(st.lists(st.lists(st.integers(0, 50)), max_size=5))
def test_lines_are_merged_by_time(logs: list[list[int]]) -> None:
    sources = {
        index: [TimedLines(float(time), f"{index} {time}") for time in sorted(times)]
        for index, times in enumerate(logs)
    }
    found = list(LogMerge(sources, follow=False))
    assert [line.time for _, line in found] == sorted(time for times in logs for time in times)
    for index, lines in sources.items():
        assert [line for key, line in found if key == index] == lines


def test_a_line_without_time_stays_behind_the_one_before_it() -> None:
    first = [TimedLines(1.0, "a"), TimedLines(0.0, "b"), TimedLines(3.0, "c")]
    found = [line.text for _, line in LogMerge({"x": first, "y": [TimedLines(2.0, "d")]}, follow=False)]
    assert found == ["a", "b", "d", "c"]


def test_a_followed_log_that_is_silent_holds_no_other_up() -> None:
    go_on = threading.Event()

    def silent() -> Iterator[TimedLines]:
        assert go_on.wait(60)
        yield TimedLines(9.0, "late")

    others, read = [TimedLines(1.0, "a"), TimedLines(2.0, "b")], list[tuple[str, TimedLines]]()

    def idle() -> None:
        if len(read) == 2:  # a busy machine may run the thread of the other late
            go_on.set()

    for line in LogMerge({"silent": silent(), "other": others}, follow=True, on_idle=idle):
        read.append(line)
    assert read == [*(("other", line) for line in others), ("silent", TimedLines(9.0, "late"))]


def test_an_error_of_a_log_is_raised() -> None:
    def broken() -> Iterator[TimedLines]:
        yield TimedLines(1.0, "a")
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        list(LogMerge({"x": broken()}, follow=False))


def test_on_a_terminal_the_progress_bar_of_a_rank_moves(
    terminal: io.TextIOWrapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", terminal)
    printer = logs._Printer(APP, timestamps=False, as_json=False)
    texts = ["[r0]:\r 10%", "\r 20%", "\n", "[r1]:x\n"]
    found = printer.parsed([(("r", 0), TimedLines(1.0, text)) for text in texts], [range(1)])
    assert [lines.text for _, lines in found] == ["\r 10%", "\r 20%", "\n"]


def test_the_last_lines_of_a_rank_are_looked_for_until_there_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A backend may not know whose lines are whose."""
    texts = [f"[r{int(number > 2)}]:line {number}\n" for number in range(40_000)]
    tails: list[int] = []

    def replica_log(*_: object, tail: int, **__: object) -> Iterator[TimedLines]:
        tails.append(tail)
        yield from (TimedLines(1.0, text) for text in texts[-tail:])

    scheduler = SimpleNamespace(apps=SimpleNamespace(replica_log=replica_log))
    status = SimpleNamespace(state=State.SUCCEEDED)
    job = SimpleNamespace(scheduler=scheduler, read_app=lambda: (APP, status))
    monkeypatch.setattr(logs, "opened_job", lambda *_: contextlib.nullcontext(job))
    names = ("since", "timestamps", "follow", "json")
    arguments = functools.partial(argparse.Namespace, handle="s://x/a", role="")
    logs.run(arguments(rank=[range(1)], tail=2, **dict.fromkeys(names)))
    assert capsys.readouterr().out == "[0] line 1\n[0] line 2\n"
    logs.run(arguments(rank=[range(1, 2)], tail=1, **dict.fromkeys(names)))
    assert capsys.readouterr().out == "[1] line 39999\n"
    assert tails == [1002, 16_032, 256_512, 256_512, 1001, 1001]
    old = [TimedLines(1.0, f"[r0]:{text}\n") for text in "abc"]
    late = [TimedLines(9e9, "[r0]:d\n"), TimedLines(1.0, "[r0]:e\n")]  # after the command has begun
    scheduler.apps.replica_log, status.state = lambda *_, **__: iter([*old, *late]), State.RUNNING
    logs.run(arguments(tail=2, **dict.fromkeys((*names, "rank")) | {"follow": True}))
    assert capsys.readouterr().out == "".join(f"[0] {text}\n" for text in "bcde")
