# SPDX-License-Identifier: BSD-3-Clause
"""Ask torch's flight recorders in the ranks of a host for dumps and for the state of their collectives.

A rank connects when its program forms a process group (``rank_recorder``). It sends a dump of each recorder when the
host asks, before ranks are stopped, and when its program fails; and its process groups when the host asks. Each message
of a rank has a head, its kind and its size. A dump is a pickle in torch's own format, which the host stores in
``attempt_N/flight_recorder/``, as ``gloo_rank_K`` or ``nccl_rank_K``, and does not read; the process groups are JSON,
which is checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import struct
import time
from collections.abc import Collection
from pathlib import Path

from torchx_monarch.host.ranks.rank_recorder import (
    CODE,
    DUMP,
    DUMPS,
    FAILURE,
    GROUPS,
    HEAD,
    MAX_GROUPS,
    MAX_RECENT,
)
from torchx_monarch.insight.rank_sample import Collective, GroupStatus, parse_ranks
from torchx_monarch.model.codec import DecodeError, decode
from torchx_monarch.system import safe_files

_FOLDER = "flight_recorder"

_TIMEOUT = 0.5
"""Seconds by which a rank that does not send its dump, such as one that holds the GIL, delays the signal to stop."""

_MAX_DUMP = 1 << 26
"""Bytes of a dump. torch keeps 2000 collectives by default, which take some megabytes with their stacks."""

_MAX_DUMPS = 40
"""Dumps that are taken from one rank; each replaces the last one of its recorder."""

_MAX_STATUS = 1 << 18
"""Bytes of the process groups of a rank."""

_MAX_NAME = 200
"""Characters of the name of a group or an operation that are kept."""

_MAX_NUMBER = 1 << 53
"""Largest sequence number and size that a rank can have, which every reader of JSON represents."""


class FlightRecorders:
    """Receive dumps and process groups of this host's ranks.

    Attributes:
        path: socket file to which ranks connect.

    Args:
        folder: folder of the host's sockets, of mode 0700.
    """

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, "recorder")
        self._folders: dict[int, Path | None] = {}
        self._ranks: dict[int, _Connection] = {}
        self._grouped: dict[int, float] = {}
        self._failed: dict[int, tuple[float, int]] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Start to listen, unless it does; if that fails there are no dumps, and ranks run all the same."""
        with contextlib.suppress(OSError):
            self._server = self._server or await asyncio.start_unix_server(self._serve, self.path)

    def expect(self, ranks: dict[int, Path | None]) -> None:
        """Set the folders of the ranks of the present attempt, by pid; None for no files."""
        self._folders = ranks
        self._grouped = {pid: time for pid, time in self._grouped.items() if pid in ranks}
        self._failed = {pid: failure for pid, failure in self._failed.items() if pid in ranks}

    def grouped(self, pid: int) -> float | None:
        """Return when a rank formed its first process group, in seconds since the epoch; None if it has formed none."""
        return self._grouped.get(pid)

    def failed(self, pid: int) -> tuple[float, int] | None:
        """Return when a rank told that its program had failed, in seconds since the epoch, and with which exit code.

        Returns:
            None if the rank has not, or has formed no process group.
        """
        return self._failed.get(pid)

    async def collect(self, pids: Collection[int]) -> None:
        """Have ranks send dumps; return when these are stored, or after ``_TIMEOUT``.

        Args:
            pids: process ids of the ranks. Those without a process group are left out.
        """
        asked = [self._ranks[pid] for pid in pids if pid in self._ranks]
        for connection in asked:
            connection.stored.clear()
            connection.writer.write(DUMP)
        if asked:
            waiting = [asyncio.ensure_future(connection.stored.wait()) for connection in asked]
            _, late = await asyncio.wait(waiting, timeout=_TIMEOUT)
            for task in late:
                task.cancel()

    async def status(self, pids: Collection[int], timeout: float) -> dict[int, tuple[GroupStatus, ...]]:
        """Ask ranks for the state of their collectives.

        Args:
            pids: process ids of the ranks.
            timeout: seconds for all answers.

        Returns:
            The process groups by pid: empty for a rank that has formed none, or has ended. A rank that has not
            answered within ``timeout`` is left out: it is stopped, or holds the GIL.
        """
        asked = {pid: self._ranks[pid].ask() for pid in pids if pid in self._ranks}
        if asked:
            await asyncio.wait(asked.values(), timeout=timeout)
        groups = {pid: answer.result() for pid, answer in asked.items() if answer.done()}
        return {**{pid: () for pid in pids if pid not in asked}, **groups}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        credentials = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid: int = struct.unpack("3i", credentials)[0]
        connection = self._ranks[pid] = _Connection(writer)
        self._grouped[pid] = time.time()
        dumps = 0
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, DecodeError):
            while dumps < _MAX_DUMPS:
                kind, size = HEAD.unpack(await reader.readexactly(HEAD.size))
                if kind == FAILURE and size == CODE.size:
                    (code,) = CODE.unpack(await reader.readexactly(CODE.size))
                    self._failed.setdefault(pid, (time.time(), code))
                elif kind in DUMPS and size <= _MAX_DUMP:
                    dumps += 1
                    data = await _read(reader, size)
                    # When its interpreter ends, a program that has failed may destroy the groups.
                    if pid not in self._failed:
                        self._store(pid, DUMPS[kind], data)
                elif kind == DUMP and not size:
                    connection.stored.set()
                # A rank says nothing of its groups that it is not asked: reading costs the host time.
                elif kind == GROUPS and size <= _MAX_STATUS and connection.is_asked:
                    connection.answer(parse_groups(await _read(reader, size)))
                else:
                    break
        if self._ranks.get(pid) is connection:
            del self._ranks[pid]
        connection.stored.set()
        connection.answer(())
        writer.close()

    def _store(self, pid: int, recorder: str, data: bytes) -> None:
        folder = self._folders.get(pid)
        if folder is None:
            return
        path = folder.parent / _FOLDER / f"{recorder}_rank_{folder.name}"
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            # torch's analyser reads every file of the folder, so an unfinished one is beside it.
            aside = str(path.parent.with_name(f".{_FOLDER}_{path.name}"))
            safe_files.replace_file(aside, data)
            os.replace(aside, path)


def parse_groups(data: bytes) -> tuple[GroupStatus, ...]:
    """Parse the process groups that a rank has sent, and limit what it can make others keep.

    Raises:
        DecodeError: they are something else.
    """
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError):
        raise DecodeError("the process groups of a rank are no JSON") from None
    return tuple(map(_limited, decode(_GroupsMessage, {"groups": parsed}).groups[:MAX_GROUPS]))


@dataclasses.dataclass(frozen=True)
class _GroupsMessage:
    groups: tuple[GroupStatus, ...]


def _limited(group: GroupStatus) -> GroupStatus:
    numbers = [group.enqueued, group.completed]
    try:
        parse_ranks(group.ranks)
    except ValueError as error:
        raise DecodeError(f"the ranks of a process group: {error}") from None
    if not all(0 <= number < _MAX_NUMBER for number in numbers):
        raise DecodeError("a process group has a number out of range")
    waiting = None if group.waiting is None else _limited_collective(group.waiting)
    recent = tuple(map(_limited_collective, group.recent[-MAX_RECENT:]))
    return dataclasses.replace(group, name=group.name[:_MAX_NAME], waiting=waiting, recent=recent)


def _limited_collective(collective: Collective) -> Collective:
    if not all(
        0 <= number < _MAX_NUMBER
        for number in (collective.number, collective.called, *(n for size in collective.sizes for n in size))
    ):
        raise DecodeError("a collective has a number out of range")
    return dataclasses.replace(collective, name=collective.name[:_MAX_NAME])


async def _read(reader: asyncio.StreamReader, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        if not (part := await reader.read(min(1 << 16, size - len(data)))):
            raise asyncio.IncompleteReadError(bytes(data[:16]), size)
        data += part
    return bytes(data)


class _Connection:
    """The connection of one rank.

    Attributes:
        writer: writes requests to the rank.
        stored: set when a dump has been stored since the request for it, or the connection has ended.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.stored = asyncio.Event()
        self._answer: asyncio.Future[tuple[GroupStatus, ...]] | None = None

    @property
    def is_asked(self) -> bool:
        """Whether the rank has not answered the last request for its process groups."""
        return self._answer is not None and not self._answer.done()

    def ask(self) -> asyncio.Future[tuple[GroupStatus, ...]]:
        """Return the answer to come. A second request waits for that of the first: none pile up in a stopped rank."""
        if self._answer is None or self._answer.done():
            self._answer = asyncio.get_running_loop().create_future()
            self.writer.write(GROUPS)
        return self._answer

    def answer(self, groups: tuple[GroupStatus, ...]) -> None:
        """Set the answer, if it is awaited."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(groups)
