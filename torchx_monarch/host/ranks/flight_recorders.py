# SPDX-License-Identifier: BSD-3-Clause
"""Ask torch's flight recorders in the ranks of a host for dumps and for the state of their collectives.

A rank connects when its program forms a process group (``rank_recorder``), and sends messages with a head, their kind
and their size. A dump is a pickle in torch's own format, which the host stores in ``attempt_N/flight_recorder/``, as
``gloo_rank_K`` or ``nccl_rank_K``, and does not read; the process groups are JSON, which is checked: what a rank says
reaches the controller and every client.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import struct
import time
from collections.abc import Collection
from pathlib import Path

from torchx_monarch.host.ranks.rank_process import Rank
from torchx_monarch.host.ranks.rank_recorder import (
    CODE,
    DUMP,
    DUMPS,
    FAILURE,
    GROUPS,
    HEAD,
    MAX_CALLS,
    MAX_GROUPS,
    MAX_RECENT,
)
from torchx_monarch.insight.group_calls import Collective, GroupStatus, parse_ranks
from torchx_monarch.model.codec import decode
from torchx_monarch.system import children, safe_files
from torchx_monarch.system.console import WriterThread
from torchx_monarch.transport.connections import peer_pid

_FOLDER = "flight_recorder"

_TIMEOUT = 0.5
"""Seconds by which a rank that does not send its dump, such as one that holds the GIL, delays the signal to stop."""

_MAX_SIZES = {FAILURE: CODE.size, DUMP: 0, GROUPS: 1 << 18, **dict.fromkeys(DUMPS, 1 << 26)}
"""Bytes of a message of each kind. torch keeps 2000 collectives by default, some megabytes with their stacks."""

_MAX_DUMPS = 40
"""Dumps that are taken from one rank; each replaces the last one of its recorder."""

_MAX_NAME = 200
"""Characters of the name of a group or an operation that are kept."""

_MAX_NUMBER = 1 << 53
"""Sequence numbers and sizes are less than this, which every reader of JSON represents."""


class FlightRecorders:
    """Receive dumps and process groups of this host's ranks, which connect to the socket file ``path``."""

    def __init__(self, folder: str, disk: WriterThread) -> None:
        self.path = os.path.join(folder, "recorder")
        self._disk = disk
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Start to listen, unless it does; if that fails there are no dumps, and ranks run all the same."""
        with contextlib.suppress(OSError):
            self._server = self._server or await asyncio.start_unix_server(self._serve, self.path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank, dumps = children.owners.get(peer_pid(writer)), 0
        if not isinstance(rank, Rank):
            writer.close()
            return
        connection = rank.recorder = RecorderConnection(writer)
        rank.grouped = time.time()
        with contextlib.suppress(OSError, EOFError, LookupError, ValueError, RecursionError, struct.error):
            while dumps < _MAX_DUMPS:
                kind, size = HEAD.unpack(await reader.readexactly(HEAD.size))
                # A rank says nothing of its groups that it is not asked: reading costs the host time.
                if size > _MAX_SIZES[kind] or (kind == GROUPS and GROUPS not in connection.awaited):
                    break
                data = await reader.readexactly(size)
                if kind == FAILURE:
                    rank.failure = rank.failure or (time.time(), CODE.unpack(data)[0])
                elif kind == DUMP:
                    connection.answer(DUMP)
                elif kind == GROUPS:
                    groups = decode(tuple[GroupStatus, ...], json.loads(data))
                    connection.answer(GROUPS, tuple(map(_limited, groups[:MAX_GROUPS])))
                else:
                    dumps += 1
                    if not rank.failure:  # when its interpreter ends, a program may destroy the groups
                        await self._disk.run(_store, rank.directory, DUMPS[kind], data)
        if rank.recorder is connection:
            rank.recorder = None
        connection.answer(DUMP)
        connection.answer(GROUPS)
        writer.close()


async def collect(ranks: Collection[Rank]) -> None:
    """Have ranks, those with a process group, send dumps; return when they are stored, or after ``_TIMEOUT``."""
    if asked := [rank.recorder.ask(DUMP) for rank in ranks if rank.recorder]:
        await asyncio.wait(asked, timeout=_TIMEOUT)


async def status(ranks: Collection[Rank], timeout: float) -> dict[int, tuple[GroupStatus, ...]]:
    """Return the process groups of ranks, by pid: empty for one that has formed none, or has ended.

    A rank that has not answered within ``timeout`` seconds is left out: it is stopped, or holds the GIL.
    """
    asked = {rank.pid: rank.recorder.ask(GROUPS) for rank in ranks if rank.recorder}
    if asked:
        await asyncio.wait(asked.values(), timeout=timeout)
    groups = {pid: answer.result() for pid, answer in asked.items() if answer.done()}
    return {**{rank.pid: () for rank in ranks if rank.pid not in asked}, **groups}


def _store(folder: Path | None, recorder: str, data: bytes) -> None:
    if folder is None:
        return
    path = folder.parent / _FOLDER / f"{recorder}_rank_{folder.name}"
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        # torch's analyser reads every file of the folder, so an unfinished one is beside it.
        aside = str(path.parent.with_name(f".{_FOLDER}_{path.name}"))
        safe_files.replace_file(aside, data)
        os.replace(aside, path)


def _limited(group: GroupStatus) -> GroupStatus:
    """Limit what a rank can make others keep; raise a ``ValueError`` if a value is out of range."""
    parse_ranks(group.ranks)
    calls = group.calls[-MAX_CALLS:] if len(group.calls) <= group.enqueued else ()
    if not all(0 <= number < _MAX_NUMBER for number in (group.enqueued, group.completed, group.last_call, *calls)):
        raise ValueError("a process group has a number out of range")
    waiting = None if group.waiting is None else _limited_collective(group.waiting)
    recent = tuple(map(_limited_collective, group.recent[-MAX_RECENT:]))
    return dataclasses.replace(group, name=group.name[:_MAX_NAME], waiting=waiting, recent=recent, calls=calls)


def _limited_collective(collective: Collective) -> Collective:
    sizes = (number for size in collective.sizes for number in size)
    if not all(0 <= number < _MAX_NUMBER for number in (collective.number, collective.called, *sizes)):
        raise ValueError("a collective has a number out of range")
    return dataclasses.replace(collective, name=collective.name[:_MAX_NAME])


class RecorderConnection:
    """The connection of one rank; ``awaited`` has the answer to come to the last request of each kind."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.awaited: dict[bytes, asyncio.Future[tuple[GroupStatus, ...]]] = {}

    def ask(self, kind: bytes) -> asyncio.Future[tuple[GroupStatus, ...]]:
        """Return the answer to come. A second request waits for that of the first: none pile up in a stopped rank."""
        if kind not in self.awaited:
            self.awaited[kind] = asyncio.get_running_loop().create_future()
            self._writer.write(kind)
        return self.awaited[kind]

    def answer(self, kind: bytes, groups: tuple[GroupStatus, ...] = ()) -> None:
        if (answer := self.awaited.pop(kind, None)) is not None:
            answer.set_result(groups)
