# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Collect what torch's flight recorder has of the ranks of a host: ``attempt_N/flight_recorder/rank_K``.

A rank connects when its program forms a process group (``rank_recorder``). It sends a dump when the host asks, before
ranks are stopped, and when its program fails. A dump is a size, 8 bytes, and a pickle in torch's own format, which the
host stores and does not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Collection
from pathlib import Path

from torchx_monarch.host.ranks.rank_recorder import SIZE
from torchx_monarch.system import safe_files

_FOLDER = "flight_recorder"

_TIMEOUT = 0.5
"""Seconds by which a rank that does not send its dump, such as one that holds the GIL, delays the signal to stop."""

_MAX_BYTES = 1 << 26
"""Bytes of a dump. torch keeps 2000 collectives by default, which take some megabytes with their stacks."""

_MAX_DUMPS = 20
"""Dumps that are taken from one rank; each replaces the last one."""


class RecorderDumps:
    """Receive the dumps of this host's ranks.

    Attributes:
        path: socket file to which ranks connect.

    Args:
        folder: folder of the host's sockets, of mode 0700.
    """

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, "recorder")
        self._files: dict[int, Path] = {}
        self._ranks: dict[int, _Connection] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Start to listen, unless it does; if that fails there are no dumps, and ranks run all the same."""
        with contextlib.suppress(OSError):
            self._server = self._server or await asyncio.start_unix_server(self._serve, self.path)

    def expect(self, ranks: dict[int, Path]) -> None:
        """Set the ranks of the present attempt: the files of their dumps, by pid."""
        self._files = ranks

    async def collect(self, pids: Collection[int]) -> None:
        """Have ranks send dumps; return when these are stored, or after ``_TIMEOUT``.

        Args:
            pids: process ids of the ranks. Those without a process group are left out.
        """
        asked = [self._ranks[pid] for pid in pids if pid in self._ranks]
        for one in asked:
            one.stored.clear()
            one.writer.write(b"d")
        if asked:
            waiting = [asyncio.ensure_future(one.stored.wait()) for one in asked]
            _, late = await asyncio.wait(waiting, timeout=_TIMEOUT)
            for task in late:
                task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        credentials = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid: int = struct.unpack("3i", credentials)[0]
        connection = self._ranks[pid] = _Connection(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            for _ in range(_MAX_DUMPS):
                (size,) = SIZE.unpack(await reader.readexactly(SIZE.size))
                if size > _MAX_BYTES:
                    break
                await self._store(pid, reader, size)
                connection.stored.set()
        if self._ranks.get(pid) is connection:
            del self._ranks[pid]
        connection.stored.set()
        writer.close()

    async def _store(self, pid: int, reader: asyncio.StreamReader, size: int) -> None:
        path = self._files.get(pid)
        data = bytearray()
        while len(data) < size:
            if not (part := await reader.read(min(1 << 16, size - len(data)))):
                raise asyncio.IncompleteReadError(bytes(data[:16]), size)
            data += part
        if path is None:
            return
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            # torch's analyser reads every file of the folder, so an unfinished one is beside it.
            aside = str(path.parent.with_name(f".{_FOLDER}_{path.name}"))
            safe_files.replace_file(aside, bytes(data))
            os.replace(aside, path)


def dump_path(folder: Path, rank: int) -> Path:
    """Return the file for the dump of a rank.

    Args:
        folder: folder of the attempt.
        rank: the global rank.
    """
    return folder / _FOLDER / f"rank_{rank}"


class _Connection:
    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.stored = asyncio.Event()
