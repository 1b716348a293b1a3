# SPDX-License-Identifier: BSD-3-Clause
"""Profile ranks for clients: py-spy samples their stacks without stopping them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import IO

from torchx_monarch.host.ranks.rank_main import OWN_FILES
from torchx_monarch.host.ranks.rank_process import Rank
from torchx_monarch.insight.profile import RankProfile, parse_collapsed
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
    ranks = [rank for rank in ranks if rank.is_running]
    until = time.monotonic() + seconds + _MARGIN
    limit = _MAX_SIZE_OF_HOST // max(1, len(ranks))
    with contextlib.ExitStack() as stack:
        samplers = [stack.enter_context(_Sampler(rank, replica, seconds, idle)) for rank in ranks]
        while any(sampler.is_running for sampler in samplers) and time.monotonic() < until:
            await asyncio.sleep(0.05)
        return [await asyncio.to_thread(sampler.result, limit) for sampler in samplers]  # megabytes are parsed


class _Sampler:
    """A process of py-spy that profiles a rank, for a ``with`` statement, which ends it.

    It writes to a file without a name. What it prints may be long, and nobody reads it meanwhile.
    """

    def __init__(self, rank: Rank, replica: int, seconds: float, idle: bool) -> None:
        self._profile = RankProfile(rank.rank, replica, rank.process.pid)
        self._seconds = seconds
        self._idle = idle
        self._process: subprocess.Popen[bytes] | None = None
        self._problem = ""

    def __enter__(self) -> _Sampler:
        self._files: list[IO[bytes]] = []
        try:
            self._files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115  # closed by __exit__
            samples, said = self._files
            command = [_py_spy(), "record", "--pid", str(self._profile.pid), "--format", "raw"]
            command += ["--duration", str(max(1, round(self._seconds))), "--rate", str(_RATE), "--nonblocking"]
            command += ["--full-filenames", *(["--idle"] if self._idle else [])]
            command += ["--output", f"/proc/self/fd/{samples.fileno()}"]
            files = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": said}
            self._process = subprocess.Popen(command, pass_fds=[samples.fileno()], **files)  # type: ignore[call-overload]
        except (OSError, ValueError) as error:
            self._problem = str(error)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for file in self._files:
            file.close()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def result(self, limit: int) -> RankProfile:
        """Return the profile, whose stacks have at most ``limit`` bytes as JSON."""
        if self._process is None:
            return replace(self._profile, problem=self._problem)
        if self._process.poll() is None:
            return replace(self._profile, problem=f"py-spy has not ended {_MARGIN:g} s after the time was over")
        samples, said = self._files
        for file in self._files:
            file.seek(0)
        found = parse_collapsed(samples.read(_MAX_FILE).decode(errors="replace"), limit, OWN_FILES)
        if found:
            return replace(self._profile, samples=found)
        lines = said.read(_MAX_FILE).decode(errors="replace").strip().splitlines()
        errors = [line for line in lines if line.startswith("Error")]
        why = "none of its threads was busy (--idle shows those that wait)" if not self._process.returncode else ""
        return replace(self._profile, problem=why or f"py-spy: {one_line((errors or lines or ['it failed'])[0], 200)}")


def _py_spy() -> str:
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    program = beside if os.access(beside, os.X_OK) else shutil.which("py-spy")
    if program is None:
        raise ValueError("py-spy is not installed on this host (pip install py-spy)")
    return program
