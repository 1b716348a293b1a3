# SPDX-License-Identifier: BSD-3-Clause
"""References in the log of a replica to the output of its ranks, whose bytes are in the ranks' own files alone.

Where the reader of a host's output knows them (MONARCH_LOG_REFERENCES), the host writes a line for each piece of a
rank's output that it passes on: the file, the offset and length of the piece, and the prefix of its lines. So the log
says what was passed on in which order, and each byte is kept once.
"""

from __future__ import annotations

import os
import re
import select
from typing import NamedTuple

from torchx_monarch.system import safe_files

MARK = b"\x1e"
"""The first byte of a reference: a record separator."""

MAX_BYTES = select.PIPE_BUF
"""The maximum bytes of a reference: it is written to a pipe as a whole."""

PARTS = 4
"""Parts in which the log of a rank is kept under a limit. The older ones are named ``stdout.log.N`` and of equal size:
part N begins at N times that."""

_LINE = re.compile(rb"\x1e((?:run_\d+/)?attempt_\d+/(\d{1,9})/(stdout|stderr)) (\d{1,18}) (\d{1,9}) (.*)", re.DOTALL)


class LogReference(NamedTuple):
    """A piece of a rank's output.

    Attributes:
        name: path of the rank's file below the logs of the replica, without its ending ``.log``.
        offset: where the piece begins, in bytes; ``size`` is how many it has. Without any, the unfinished line of the
            rank has ended.
        prefix: what precedes each line.
    """

    name: str
    offset: int
    size: int
    prefix: bytes

    @property
    def rank(self) -> int:
        return int(self.name.split("/")[-2])

    @property
    def stream(self) -> str:
        return self.name.split("/")[-1]

    def line(self) -> bytes:
        """Return the line that stands for the piece; one longer than ``MAX_BYTES`` is not to be written."""
        return MARK + f"{self.name} {self.offset} {self.size} ".encode() + self.prefix + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> LogReference | None:
        """Parse a line without its line feed; return None for any other line."""
        found = _LINE.fullmatch(line)
        return found and cls(found[1].decode(), int(found[4]), int(found[5]), found[6])


def prefixed(text: bytes, prefix: bytes, goes_on: bool) -> bytes:
    """Return whole lines, or a piece of a line, with a prefix before each line that begins in it.

    Args:
        goes_on: whether the text continues a line.
    """
    if not prefix:
        return text
    ended = text.endswith(b"\n")
    shown = (text[:-1] if ended else text).replace(b"\n", b"\n" + prefix) + (b"\n" if ended else b"")
    return shown if goes_on else prefix + shown


def parts(path: str) -> tuple[list[int], int]:
    """Return the numbers of the older parts of a rank's log, ascending, and their size; none and 0 without any."""
    folder, name = os.path.split(path)
    numbers = sorted(safe_files.numbered(folder, f"{name}."))[-PARTS:]
    size = os.stat(f"{path}.{numbers[-1]}", follow_symlinks=False).st_size if numbers else 0
    return numbers, size
