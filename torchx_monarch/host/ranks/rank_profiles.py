# SPDX-License-Identifier: BSD-3-Clause
"""Profile ranks for clients: py-spy samples their stacks without stopping them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import IO

from torchx_monarch.host.ranks.rank_main import OWN_FILES
from torchx_monarch.host.ranks.rank_process import Rank
from torchx_monarch.insight.profile import RankProfile, parse_collapsed
from torchx_monarch.system import children
from torchx_monarch.system.untrusted_text import one_line

_RATE = 100
"""Samples a second."""

_MAX_SIZE_OF_HOST = 1 << 22
"""Bytes of the stacks of all ranks of one host as JSON: they are one message (``messages.MAX_MESSAGE``)."""

_MAX_FILE = 1 << 26
"""Bytes that are read of what py-spy has written."""

_MARGIN = 20.0
"""Seconds in which py-spy must begin and end: it reads the symbols of all libraries, those of torch among them."""


async def profile(ranks: Sequence[Rank], replica: int, seconds: float, idle: bool) -> list[RankProfile]:
    """Profile ranks that run, all at the same time.

    Args:
        idle: whether threads that wait are sampled, too.
    """
    running = [RankProfile(rank.rank, replica, rank.pid) for rank in ranks if rank.is_running]
    limit = _MAX_SIZE_OF_HOST // max(1, len(running))
    return await asyncio.gather(*(_sampled(rank, seconds, idle, limit) for rank in running))


async def _sampled(rank: RankProfile, seconds: float, idle: bool, limit: int) -> RankProfile:
    """Add the stacks of a rank to its profile, at most ``limit`` bytes as JSON, or the reason why there are none."""
    options = ["--duration", str(max(1, round(seconds))), "--rate", str(_RATE), *(["--idle"] if idle else [])]
    with contextlib.ExitStack() as stack:
        try:
            # Files without a name: what py-spy prints may be long, and nobody reads it meanwhile.
            samples, said = await asyncio.to_thread(
                lambda: [stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)]
            )
            options += ["--nonblocking", "--full-filenames", "--output", f"/proc/self/fd/{samples.fileno()}"]
            process, _ = children.start(
                [await asyncio.to_thread(_py_spy), "record", "--pid", str(rank.pid), "--format", "raw", *options],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=[samples.fileno()],
            )
        except (OSError, ValueError) as error:
            return replace(rank, problem=str(error))
        try:
            await asyncio.wait_for(process.wait(), seconds + _MARGIN)
        except asyncio.TimeoutError:
            return replace(rank, problem=f"py-spy has not ended {_MARGIN:g} s after the time was over")
        finally:
            process.send(signal.SIGKILL)
        text = await asyncio.to_thread(_text, samples)
        if found := await asyncio.to_thread(parse_collapsed, text, limit, OWN_FILES):  # megabytes
            return replace(rank, samples=found)
        lines = (await asyncio.to_thread(_text, said)).strip().splitlines()
        errors = [line for line in lines if line.startswith("Error")]
        why = "" if process.returncode else "none of its threads was busy (--idle shows those that wait)"
        return replace(rank, problem=why or f"py-spy: {one_line((errors or lines or ['it failed'])[0], 200)}")


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_MAX_FILE).decode(errors="replace")


def _py_spy() -> str:
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    program = beside if os.access(beside, os.X_OK) else shutil.which("py-spy")
    if program is None:
        raise ValueError("py-spy is not installed on this host (pip install py-spy)")
    return program
