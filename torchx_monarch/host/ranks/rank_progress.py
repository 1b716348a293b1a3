# SPDX-License-Identifier: BSD-3-Clause
"""Read what the program of a rank has reported by ``torchx_monarch.progress`` (see ``insight.step_progress``)."""

from __future__ import annotations

import binascii
import contextlib
import dataclasses
import os
from pathlib import Path

from torchx_monarch.insight.rank_sample import Progress
from torchx_monarch.insight.step_progress import HEAD, MAX_METRICS, MAX_NAME, MAX_STEP, NAME, SIZE
from torchx_monarch.model.codec import DecodeError, decode
from torchx_monarch.system import safe_files
from torchx_monarch.system.untrusted_text import one_line

_TRIES = 3
"""How often the file is read if the rank is writing it."""


def prepare(directory: Path) -> None:
    """Make the empty file in which a rank reports its progress. Without it, it reports none.

    Args:
        directory: folder of the rank's logs.
    """
    with contextlib.suppress(OSError):
        (directory / NAME).unlink(missing_ok=True)
        os.close(safe_files.open_file(directory / NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL))


def read(directory: Path | None) -> Progress | None:
    """Return the progress that a rank has reported; None for none, or for a file that something else has written.

    Args:
        directory: folder of the rank's logs; None if it has none.
    """
    if directory is None:
        return None
    with contextlib.suppress(OSError):
        file = safe_files.open_file(directory / NAME)
        try:
            for _ in range(_TRIES):
                if (found := parse(os.pread(file, SIZE, 0))) is not None:
                    return found
        finally:
            os.close(file)
    return None


def read_at_end(directory: Path | None) -> Progress | None:
    """Return the progress of a rank that has ended, and remove the file of one that has reported none.

    Args:
        directory: folder of the rank's logs; None if it has none.
    """
    found = read(directory)
    if found is None and directory is not None:
        with contextlib.suppress(OSError):
            (directory / NAME).unlink(missing_ok=True)
    return found


def parse(data: bytes) -> Progress | None:
    """Return the progress that the content of a file tells; None if it is no progress."""
    if len(data) < HEAD.size:
        return None
    size, checksum = HEAD.unpack_from(data)
    text = data[HEAD.size : HEAD.size + size]
    if len(text) != size or binascii.crc32(text) != checksum:
        return None
    try:
        found = decode(Progress, safe_files.parse_json(text.decode()))
    except (DecodeError, ValueError):
        return None
    steps = [step for step in (found.step, found.total, found.checkpoint, found.first_step) if step is not None]
    if not all(0 <= number < MAX_STEP for number in (*steps, found.time, found.first_time)):
        return None
    names = list(found.metrics)[:MAX_METRICS]
    return dataclasses.replace(found, metrics={one_line(name[:MAX_NAME]): found.metrics[name] for name in names})
