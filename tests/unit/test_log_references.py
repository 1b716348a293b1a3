# SPDX-License-Identifier: BSD-3-Clause
"""The output of ranks is in their own files alone, and the log of their replica refers to it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchx_monarch.backends.core.snapshot import AppSnapshot, LogQuery, TimedLines
from torchx_monarch.host.ranks import rank_logs, rank_output
from torchx_monarch.host.ranks.rank_logs import LogSpace, RankLog
from torchx_monarch.host.ranks.rank_output import OutputPipe
from torchx_monarch.host.ranks.run_output import RunOutput, RunOutputSink
from torchx_monarch.insight.run_log import RunLog
from torchx_monarch.supervisor import log_files, log_reader
from torchx_monarch.system.console import Console, WriterThread
from torchx_monarch.system.line_output import lines_of
from torchx_monarch.system.log_references import PARTS


class Replica:
    """A host whose ranks print, and the log of its replica.

    Args:
        refers: whether the log has references.
        limit: of each rank's log.
    """

    def __init__(self, folder: Path, refers: bool = True, limit: int = 0) -> None:
        self.folder = folder
        self.run_texts = ""
        self.said: list[str] = []
        self._refers, self._limit = refers, limit
        self._log = log_files.ReplicaLog(str(folder))
        self._pipes = {stream: os.pipe() for stream in ("stdout", "stderr")}

    def run(self, pieces: Sequence[tuple[int, str, bytes]]) -> None:
        """Have ranks print pieces, each a rank, a stream and bytes; all is in the log at the end."""
        asyncio.run(self._print(pieces))
        WriterThread.finish()
        self._read()
        self._log.close()
        for ends in self._pipes.values():
            for end in ends:
                os.close(end)

    async def _print(self, pieces: Sequence[tuple[int, str, bytes]]) -> None:
        space = LogSpace(self.said.append, self._limit, str(self.folder) if self._refers else "")
        for read, _ in self._pipes.values():
            os.set_blocking(read, False)
        first = Console(self._pipes["stdout"][1])
        consoles = {"stdout": first, "stderr": Console(self._pipes["stderr"][1], first)}
        run = RunOutput("token")
        run_log = RunLog(str(self.folder / "run_1" / "journal.jsonl"), asyncio.get_running_loop())
        outputs: dict[tuple[int, str], OutputPipe] = {}
        for rank, stream in dict.fromkeys((rank, stream) for rank, stream, _ in pieces):
            read, write = os.pipe()
            os.close(write)
            outputs[rank, stream] = output = OutputPipe(os.fdopen(read, "rb", 0), None)
            name = f"attempt_0/{rank}/{stream}"
            path = self.folder / f"{name}.log"
            path.parent.mkdir(parents=True, exist_ok=True)
            console = consoles[stream]
            log = RankLog(str(path), space, console if self._refers else None, name)
            log.copy = RunOutputSink(run, rank, stream, "")
            output.assign(log, console, f"[r{rank}]:")
        for rank, stream, data in pieces:
            outputs[rank, stream]._arrived(data)
            await asyncio.to_thread(WriterThread.finish)
            self._read()
        for output in outputs.values():
            output.close()
        await asyncio.to_thread(WriterThread.finish)
        space.call(run.end, iter(()))
        while records := await run.read():
            run_log.append_lines(records.encode())
        run_log.close()
        async for lines in run_log.follow():
            self.run_texts += "".join(json.loads(line)["text"] for line in lines)

    def _read(self) -> None:
        for stream, (read, _) in self._pipes.items():
            try:
                while data := os.read(read, 1 << 16):
                    self._log.feed(stream, data)
            except BlockingIOError:
                pass

    def lines(self, start: int = 0, **query: Any) -> list[TimedLines]:
        return list(log_reader.lines(str(self.folder), LogQuery[AppSnapshot](**query), None, start))

    def texts(self, **query: Any) -> list[str]:
        return [text for lines in self.lines(**query) for text in lines_of(lines.text)]

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())


PIECES = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from(["stdout", "stderr"]), st.text("ab\r\n", min_size=1).map(str.encode)),
    max_size=12,
)


@given(PIECES)
def test_a_log_with_references_reads_as_one_without(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[tuple[int, str, bytes]]
) -> None:
    with_text = Replica(tmp_path_factory.mktemp("text"), refers=False)
    referring = Replica(tmp_path_factory.mktemp("referring"))
    for replica in (with_text, referring):
        with pytest.MonkeyPatch.context() as patched:
            # How long a piece takes on a busy machine would decide which states of a progress bar are shown.
            patched.setattr(rank_output, "_DRAW_AFTER", 1000.0)
            replica.run(pieces)
    for stream in ("", "stdout", "stderr"):
        assert referring.texts(stream=stream) == with_text.texts(stream=stream)
    lines = referring.lines()
    for number, line in enumerate(lines):
        rest = [later.text.removeprefix("[continued] ") for later in referring.lines(line.end)]
        assert "".join(rest) == "".join(later.text.removeprefix("[continued] ") for later in lines[number + 1 :])


def test_what_a_full_disk_has_lost_stands_in_the_log_and_changes_no_line_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = RankLog._write

    def write_or_lose(log: RankLog, data: bytes) -> None:
        descriptor = log._fd
        if data == b"b\n":
            log._fd = os.open("/dev/full", os.O_WRONLY)
        write(log, data)
        if data == b"b\n":
            os.close(log._fd)
            log._fd = descriptor

    monkeypatch.setattr(RankLog, "_write", write_or_lose)
    replica = Replica(tmp_path)
    replica.run([(0, "stdout", line) for line in (b"a", b"b\n", b"c\n")])
    assert replica.texts() == ["[r0]:ab\n", "[r0]:c\n"]
    assert replica.run_texts == "".join(replica.texts())


def test_each_byte_is_kept_once(tmp_path: Path) -> None:
    printed = [
        (rank, "stdout", f"rank {rank} is at step {step}\n".encode() * 400) for step in range(40) for rank in (0, 1)
    ]
    replica = Replica(tmp_path)
    replica.run(printed)
    assert replica.size < 1.1 * sum(len(data) for _, _, data in printed)
    assert len(replica.texts()) == 32_000 and len(replica.lines()) < 200  # a reader handles lines together
    assert replica.run_texts == "".join(replica.texts())


def test_the_last_lines_of_a_rank_are_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(tmp_path)
    replica.run([(1, "stdout", b"early\nlast of 1\n"), *[(0, "stdout", b"much\n" * 50_000)] * 40])
    read, pread = [0], os.pread

    def counted(fd: int, size: int, offset: int) -> bytes:
        data = pread(fd, size, offset)
        read[0] += len(data)
        return data

    monkeypatch.setattr(os, "pread", counted)
    assert replica.texts(tail=1, ranks=[range(1, 2)])[-1] == "[r1]:last of 1\n"
    assert replica.texts(tail=1)[-1] == "[r0]:much\n"
    assert read[0] < 1 << 20


@pytest.mark.parametrize("lost", ["index", "log", "rank"])
def test_a_log_of_which_a_file_is_lost_or_damaged(tmp_path: Path, lost: str) -> None:
    replica = Replica(tmp_path)
    replica.run([(0, "stdout", b"a\n"), (1, "stderr", b"b\n")])
    path = {"index": log_files.INDEX, "log": log_files.LOG, "rank": "attempt_0/0/stdout.log"}[lost]
    (tmp_path / path).unlink()
    if lost == "log":
        assert replica.texts() == [] and (tmp_path / "attempt_0/1/stderr.log").read_bytes() == b"b\n"
    elif lost == "index":
        assert replica.texts() == ["[r0]:a\n", "[r1]:b\n"]
    else:
        note, text = replica.texts()
        assert note.startswith("[monarch] attempt_0/0/stdout.log is incomplete: ") and text == "[r1]:b\n"
        assert replica.texts(ranks=[range(1, 2)]) == ["[r1]:b\n"]


@pytest.mark.parametrize("refers", [True, False])
def test_a_limit_drops_the_oldest_output_and_says_so(tmp_path: Path, refers: bool) -> None:
    limit = 4000
    replica = Replica(tmp_path, refers, limit)
    lines = [f"line {number:04}\n" for number in range(2000)]
    replica.run([(0, "stdout", line.encode() * 1) for line in lines])
    names = sorted(path.name for path in (tmp_path / "attempt_0/0").iterdir())
    assert names == ["stdout.log", *(f"stdout.log.{part}" for part in range(20 - PARTS, 20 - 1))]
    kept = sum(path.stat().st_size for path in (tmp_path / "attempt_0/0").iterdir())
    assert 3 * limit // 4 <= kept <= limit
    assert len(replica.said) == 1 and "log_limit: the oldest output is dropped" in replica.said[0]
    if refers:
        note, *shown = replica.texts()
        assert note == "[monarch] attempt_0/0/stdout.log is incomplete: its oldest part was dropped (log_limit)\n"
        assert shown == [f"[r0]:{line}" for line in lines[-len(shown) :]] and len(shown) >= kept // 10 - 1
        assert replica.texts(tail=3) == shown[-3:] and replica.run_texts.endswith("".join(shown[-3:]))
        assert replica.run_texts.count("its oldest part was dropped (log_limit)") == 1


def test_many_bytes_of_logs_and_few_free_ones_are_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_logs, "_MUCH", 1000)
    monkeypatch.setattr(rank_logs, "_CHECK", 1000)
    monkeypatch.setattr(rank_logs, "_SCARCE", 1 << 62)
    replica = Replica(tmp_path)
    replica.run([(0, "stdout", b"x" * 99 + b"\n")] * 50)
    much, free = replica.said
    assert much == "the logs of this host's ranks have passed 1e-06 GB; -cfg log_limit=SIZE drops the oldest of each"
    assert free.startswith("the disk of the ranks' logs has ") and free.endswith("/attempt_0/0/stdout.log")
