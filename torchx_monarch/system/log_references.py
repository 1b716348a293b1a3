# SPDX-License-Identifier: BSD-3-Clause
"""References in the log of a replica to the output of its ranks, whose bytes are in the ranks' own files alone.

Where the reader of a host's output knows them, the host writes a line for each piece of a rank's output that it passes
on: the file, the offset and length of the piece, and the prefix of its lines. So the log says what was passed on in
which order, and each byte is kept once. MONARCH_LOG_REFERENCES names the pipes of that reader: between them and the
host, a command of the user's may read the output (``torchrun … | tee log``).
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import NamedTuple

from torchx_monarch.system import safe_files
from torchx_monarch.system.processes import limit_hint

MARK = b"\x1e"
"""The first byte of a reference: a record separator."""

_MAX_FILES = 8
"""Logs of ranks that are open at the same time."""

PARTS = 4
"""Parts in which the log of a rank is kept under a limit. The older ones are named ``stdout.log.N`` and of equal size:
part N begins at N times that."""

_LINE = re.compile(rb"\x1e((?:run_\d+/)?attempt_\d+/(\d{1,9})/(stdout|stderr)) (\d{1,18}) (\d{1,7}) (.*)", re.DOTALL)


def pipes(stdout: int, stderr: int) -> str:
    """Return the value of MONARCH_LOG_REFERENCES for the reader of these two pipes; empty if one is closed."""
    with contextlib.suppress(OSError):
        return f"{os.fstat(stdout).st_ino},{os.fstat(stderr).st_ino}"
    return ""


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
        """Return the line that stands for the piece."""
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


class ReferredLogs:
    """Read what references name.

    Args:
        folder: the folder of the replica's logs.
        below: as for ``safe_files.open_file``.
    """

    def __init__(self, folder: str, below: str | None = None) -> None:
        self._folder = folder
        self._below = below
        self._parts: dict[str, list[tuple[int, int]]] = {}
        """The parts of each log: where they begin, and their descriptors."""
        self._why = ""
        self._incomplete = set[str]()

    def close(self) -> None:
        """Close the logs of ranks; they are opened again when they are read."""
        for name in [*self._parts]:
            self._close(name)

    def shown(self, reference: LogReference) -> bytes | None:
        """Return what a reference names, with the prefixes; as ``read`` if that is not there."""
        text = self.read(reference.name, reference.offset, reference.size)
        if not text:
            return text
        before = self.read(reference.name, reference.offset - 1, 1) if reference.offset else b""
        return prefixed(text, reference.prefix, before not in (b"\n", b"", None))

    def why_incomplete(self, name: str, is_dropped: bool) -> bytes:
        """Return a line that says why what a reference names is not there; empty if it was called for this log before.

        Args:
            is_dropped: whether it was dropped; otherwise it cannot be read.
        """
        if name in self._incomplete:
            return b""
        self._incomplete.add(name)
        why = "its oldest part was dropped (log_limit)" if is_dropped else self._why
        return f"[monarch] {name}.log is incomplete: {why}\n".encode(errors="backslashreplace")

    def read(self, name: str, offset: int, size: int) -> bytes | None:
        """Return bytes of a rank's log; b"" if they were dropped, None if they are not there, or not yet."""
        for is_open in (name in self._parts, False):
            if not is_open:
                self._open(name)
            text = b""
            for number, (begin, fd) in enumerate(self._parts[name]):
                if (at := offset + len(text)) >= begin:
                    text += os.pread(fd, size - len(text), at - begin)
                elif not number:
                    return b""
            if len(text) == size:
                return text
        return None

    def _open(self, name: str) -> None:
        self._close(name)
        if len(self._parts) >= _MAX_FILES:
            self.close()
        path = os.path.join(self._folder, f"{name}.log")
        opened = self._parts[name] = []
        self._why = "some of it is missing"
        try:
            numbers, size = _parts(path)
            for number in numbers:
                opened.append((number * size, safe_files.open_file(f"{path}.{number}", below=self._below)))
            opened.append(((numbers[-1] + 1) * size if numbers else 0, safe_files.open_file(path, below=self._below)))
            if _parts(path)[0] != numbers:  # a part has ended meanwhile
                self._open(name)
        except OSError as error:
            self._why = f"{error}{limit_hint(error)}"

    def _close(self, name: str) -> None:
        for _, fd in self._parts.pop(name, ()):
            os.close(fd)


def _parts(path: str) -> tuple[list[int], int]:
    """Return the numbers of the older parts of a rank's log, ascending, and their size; none and 0 without any."""
    folder, name = os.path.split(path)
    numbers = sorted(safe_files.numbered(folder, f"{name}."))[-PARTS:]
    size = os.stat(f"{path}.{numbers[-1]}", follow_symlinks=False).st_size if numbers else 0
    return numbers, size
