# SPDX-License-Identifier: BSD-3-Clause
"""Write the stacks of the ranks of an attempt into its folder: ``attempt_N/stacks.txt``.

The host does so before it stops ranks, and when the controller finds that they hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from torchx_monarch.host.ranks.rank_process import RankProcess
from torchx_monarch.host.ranks.rank_stacks import take_stacks
from torchx_monarch.insight.stacks import ProcessStacks, render
from torchx_monarch.system import safe_files
from torchx_monarch.system.untrusted_text import one_line

NAME = "stacks.txt"

_TIMEOUT = 0.5
"""Seconds by which a rank that does not answer delays the signal that stops the ranks. Those that answer take some
milliseconds."""

_MAX_BYTES = 1 << 20
"""Size of the file from which on nothing is added."""


class AttemptStacks:
    """Write the stacks of ranks.

    Args:
        replica: the replica of the host.
        hostname: name of the machine.
        marker: value of the app's marker variable (``processes.MARKER``).
    """

    def __init__(self, replica: int, hostname: str, marker: str) -> None:
        self._replica = replica
        self._host = f"host {replica} ({hostname})"
        self._marker = marker
        self._writing: asyncio.Task[None] | None = None

    async def write(self, folder: Path, ranks: Sequence[tuple[int, RankProcess]], number: int) -> None:
        """Write the stacks of ranks that are about to be stopped; return within about ``_TIMEOUT``, also without them.

        If the stacks are being written already, wait for that.

        Args:
            folder: folder of the attempt.
            ranks: global rank and process of each.
            number: the signal that the ranks will get.
        """
        if self._writing is None or self._writing.done():
            self._writing = asyncio.ensure_future(self._write(folder, ranks, number))
        # Not cancelled with a caller: another one may wait for it.
        await asyncio.wait([self._writing], timeout=2 * _TIMEOUT)

    async def _write(self, folder: Path, ranks: Sequence[tuple[int, RankProcess]], number: int) -> None:
        stacks = await take_stacks(ranks, self._replica, self._marker, _TIMEOUT)
        self.add(folder, stacks, f"before {signal.Signals(number).name}")

    def add(self, folder: Path, stacks: Sequence[ProcessStacks], title: str) -> None:
        """Write stacks that have been taken.

        Args:
            folder: folder of the attempt.
            stacks: the stacks; nothing is written without any.
            title: says when or why they were taken.
        """
        lines, now = render(stacks), time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        if not lines:
            return
        title = f"{self._host}, {one_line(title)}, {now} UTC:"
        text = "\n".join([title, *lines, "", ""]).encode(errors="backslashreplace")
        # Hosts may share the folder. Each adds its text by one write.
        with contextlib.suppress(OSError):
            file = safe_files.open_file(folder / NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                if os.fstat(file).st_size < _MAX_BYTES:
                    os.write(file, text)
            finally:
                os.close(file)
