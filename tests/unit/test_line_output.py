# SPDX-License-Identifier: BSD-3-Clause
"""Lines of several writers in one output, very long lines and progress bars, on their way from a rank to a reader."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.waits import WITHIN
from torchx_monarch.backends.core.snapshot import AppSnapshot, LogQuery
from torchx_monarch.host.ranks import rank_main
from torchx_monarch.host.ranks.rank_logs import FilteredFile, LogSpace, RankLog
from torchx_monarch.host.ranks.rank_output import OutputPipe
from torchx_monarch.host.ranks.run_output import RunOutput, RunOutputSink
from torchx_monarch.supervisor import log_files, log_reader
from torchx_monarch.system.console import Console, WriterThread
from torchx_monarch.system.line_output import CONTINUED, LONGEST, LineOutput, LineReader, complete, lines_of

PIECES = st.lists(st.text("ab\r\n", min_size=1, max_size=4).map(str.encode), max_size=30)


class Rank:
    """One stream of a rank: what it writes, and its output on a console of the host."""

    def __init__(
        self,
        console: Console,
        prefix: str = "",
        file: str | None = None,
        sinks: Sequence[FilteredFile | RunOutputSink] = (),
    ) -> None:
        end, self._pipe = os.pipe()
        self.output = OutputPipe(os.fdopen(end, "rb", 0), lambda: None)
        log = RankLog(file, LogSpace(print)) if file else None
        self.output.assign(log, console, prefix, sinks)
        self.output.release()

    async def write(self, data: bytes) -> None:
        """Returns when the pipe has taken it."""
        await asyncio.get_running_loop().run_in_executor(None, self._write, data)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._pipe, view) :]

    async def end(self) -> None:
        os.close(self._pipe)
        await self.output.ended.wait()


async def shown(path: Path, condition: Callable[[bytes], object]) -> bytes:
    async def look() -> bytes:
        while not condition(data := path.read_bytes()):
            await asyncio.sleep(0.01)
        return data

    return await asyncio.wait_for(look(), WITHIN)


def on_console(path: Path, program: Callable[[Console], object]) -> bytes:
    """What is on the console at the end."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        asyncio.run(program(Console(fd)))  # type: ignore[arg-type]
    finally:
        WriterThread.finish()
        os.close(fd)
    return path.read_bytes()


def test_a_line_without_end_is_shown_as_it_comes(tmp_path: Path) -> None:
    """And byte for byte, as long as nobody else writes."""
    console, text = tmp_path / "console", b"x" * (8 * LONGEST)

    async def program(out: Console) -> None:
        rank = Rank(out, "[default0]:", str(tmp_path / "log"))
        await rank.write(text)
        await shown(console, lambda data: len(data) > 6 * LONGEST)  # it has not ended
        await rank.write(b"end\nnext\n")
        await rank.end()

    assert on_console(console, program) == b"[default0]:" + text + b"end\n[default0]:next\n"
    assert (tmp_path / "log").read_bytes() == text + b"end\nnext\n"


def test_an_unfinished_line_is_ended_before_the_host_speaks(tmp_path: Path) -> None:
    console = tmp_path / "console"

    async def program(out: Console) -> None:
        rank = Rank(out)
        await rank.write(b"\r 10%")
        await shown(console, lambda data: data.endswith(b"10%"))
        out.write("host", b"[monarch] FAILED\n")
        await rank.end()

    assert on_console(console, program) == b"\r 10%\n[monarch] FAILED\n"


def test_pieces_in_a_journal_and_in_a_filtered_file(tmp_path: Path) -> None:
    text = "\N{EURO SIGN}".encode() * LONGEST

    async def program(out: Console) -> None:
        output = RunOutput("token")
        filtered = FilteredFile(str(tmp_path / "filtered"), ["needle"], b"p:")
        rank = Rank(out, "p:", sinks=[RunOutputSink(output, 3, "stdout", "p:"), filtered])
        await rank.write(text)
        await rank.write(b"\none needle\nnone\n")
        await rank.end()
        output.end(iter(()))
        records: list[str] = []
        while part := await output.read():
            records += part.splitlines()
        assert {json.loads(line)["prefix"] for line in records} == {"p:"}
        texts = [json.loads(line)["text"] for line in records]
        assert "".join(texts) == "p:" + text.decode() + "\np:one needle\np:none\n"

    on_console(tmp_path / "console", program)
    assert (tmp_path / "filtered").read_bytes() == b"p:one needle\n"


def test_a_rank_waits_while_its_output_is_not_read(tmp_path: Path) -> None:
    async def program(out: Console) -> None:
        output = RunOutput("token")
        rank = Rank(out, sinks=[RunOutputSink(output, 0, "stdout", "")])
        writing = asyncio.ensure_future(rank.write(b"line\n" * (1 << 20)))
        while output.has_room(lambda: None):
            await asyncio.sleep(0.01)
        assert not writing.done()
        read = 0
        while read < 5 << 20:
            read += sum(len(json.loads(line)["text"]) for line in (await output.read()).splitlines())
        await asyncio.wait_for(writing, WITHIN)
        await rank.end()

    on_console(tmp_path / "console", program)


@given(PIECES)
def test_one_writer_is_not_changed(pieces: list[bytes]) -> None:
    lines = LineOutput()
    assert b"".join(lines.place("a", piece) for piece in pieces) == b"".join(pieces)


@given(st.lists(st.tuples(st.sampled_from([b"1", b"2"]), st.text("x\n", min_size=1, max_size=3)), max_size=30))
def test_lines_of_two_writers_are_never_mixed(pieces: list[tuple[bytes, str]]) -> None:
    lines, said = LineOutput(), {b"1": b"", b"2": b""}
    out = b""
    for writer, text in pieces:
        data = text.encode().replace(b"x", writer)
        said[writer] += data
        out += lines.place(writer, data)
    for writer, other in ((b"1", b"2"), (b"2", b"1")):
        assert not any(writer in line and other in line for line in out.split(b"\n"))
        assert out.count(writer) == said[writer].count(writer)
    assert not out.startswith(CONTINUED)


@given(PIECES, st.integers(1, 20))
def test_a_reader_loses_nothing(pieces: list[bytes], longest: int) -> None:
    reader, pieces = LineReader(longest), [*pieces, b"\n"]
    got = [line for piece in pieces for line in reader.feed(piece)] + [reader.rest()]
    text = b"".join(line.removesuffix(b"\n") if after.startswith(CONTINUED) else line for line, after in follow(got))
    assert text.replace(CONTINUED, b"") == b"".join(pieces)


def follow(lines: list[bytes]) -> list[tuple[bytes, bytes]]:
    return list(zip(lines, [*lines[1:], b""], strict=True))


@given(st.text(st.characters(codec="utf-8"), max_size=5), st.integers(0, 20))
def test_characters_are_not_torn(text: str, end: int) -> None:
    data = text.encode()[:end]
    assert data[: complete(data)].decode() == text[: len(data[: complete(data)].decode())]
    assert len(data) - complete(data) < 4


def test_a_follower_sees_a_progress_bar(tmp_path: Path) -> None:
    out = log_files.ReplicaLog(str(tmp_path))
    out.feed("stdout", b"begin\n\r 10%\r")
    out.flush_old()
    ended = False
    following = LogQuery[AppSnapshot](stream="stdout", follow=True, has_ended=lambda: ended)
    lines = (text for lines in log_reader.lines(str(tmp_path), following) for text in lines_of(lines.text))
    assert [next(lines), next(lines)] == ["begin\n", "\r 10%"]
    out.feed("stdout", b"\r 20%\nend\n")
    assert [next(lines), next(lines)] == ["\r\r 20%\n", "end\n"]
    ended = True
    assert list(lines) == []
    out.close()
    again = log_reader.lines(str(tmp_path), LogQuery[AppSnapshot](stream="stdout"))
    assert "".join(lines.text for lines in again) == "begin\n\r 10%\r\r 20%\nend\n"


def test_a_very_long_line_is_read_in_pieces(tmp_path: Path) -> None:
    out = log_files.ReplicaLog(str(tmp_path))
    for _ in range(64):
        out.feed("stdout", b"x" * 65536)
    out.feed("stdout", b"\nend\n")
    out.close()
    lines = [line.text for line in log_reader.lines(str(tmp_path), LogQuery[AppSnapshot]())]
    assert len(lines) > 3 and max(map(len, lines)) < 2 << 20
    assert all(line.startswith("[continued] x") for line in lines[1:-1])
    assert sum(line.count("x") for line in lines) == 64 * 65536 and lines[-1] == "end\n"


_STACK = ["Exception raised from throwTimeoutError at TCPStore.cpp:149 (most recent call first):"]
_STACK += [f"frame #{number}: c10d::TCPStore::{'x' * 90} + 0x2 (0x7f in libtorch.so)" for number in range(44)]


@pytest.mark.parametrize(
    ("lines", "last"),
    [
        (["the client socket has timed out", *_STACK, ""], "the client socket has timed out"),
        (
            [
                "Current thread 0x7f (most recent call first):",
                '  File "/home/me/train.py", line 7 in <module>',
                '  File "<frozen runpy>", line 88 in _run_code',
                f'  File "{rank_main.__file__}", line 181 in _run',
                f'  File "{rank_main.OWN_FILES[-1]}", line 500 in <module>',
            ],
            'File "/home/me/train.py", line 7 in <module>',
        ),
    ],
    ids=["C++ stack", "faulthandler"],
)
def test_the_last_line_is_no_frame_below_the_program(lines: list[str], last: str, tmp_path: Path) -> None:
    async def program(out: Console) -> None:
        rank = Rank(out)
        await rank.write("\n".join([*lines, ""]).encode())
        await rank.end()
        assert rank.output.last_line.decode() == last

    on_console(tmp_path / "console", program)


def test_output_is_held_until_it_is_released_and_its_announcement_precedes_it(tmp_path: Path) -> None:
    console = tmp_path / "console"

    async def program(out: Console) -> None:
        end, pipe = os.pipe()
        output = OutputPipe(os.fdopen(end, "rb", 0), lambda: out.write("host", b"[monarch] first output\n"))
        output.assign(None, out, "[default0]:")
        os.write(pipe, b"one\ntwo")
        os.close(pipe)
        out.write("host", b"[monarch] ranks 1/1\n")
        output.release()
        await shown(console, lambda data: data.endswith(b"two\n"))
        output.release()

    assert on_console(console, program) == (
        b"[monarch] ranks 1/1\n[monarch] first output\n[default0]:one\n[default0]:two\n"
    )


def test_a_fault_in_the_thread_that_writes_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    writer = WriterThread()
    writer.call(int, "no number")
    WriterThread.finish()
    writer.end()
    assert "ValueError: invalid literal for int()" in capsys.readouterr().err
