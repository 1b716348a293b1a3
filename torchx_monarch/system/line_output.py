# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Lines of several writers in one output, and lines that are too long to wait for their end.

A line that has not ended is normally held until it has, so that lines of two writers are never mixed. Two kinds cannot
be: one that is longer than ``LONGEST``, and a progress bar, which is drawn again and again after a carriage return.
Those go out in pieces. When another writer's line comes between two pieces, the next piece starts a line of its own,
marked with ``CONTINUED``.
"""

from __future__ import annotations

from collections.abc import Iterator

LONGEST = 64 * 1024
"""Bytes of a line that are held until it ends."""

LONGEST_READ = 1024 * 1024
"""Bytes of a line that a reader of a log is given in one piece."""

CONTINUED = b"[continued] "
"""Stands before a piece of a line whose earlier pieces are not directly before it."""


class LineOutput:
    """Knows how the last line of an output ends, and so what has to stand before the next text."""

    def __init__(self) -> None:
        self._last: object = None
        """The writer whose unfinished line stands at the end of the output; None when that ends in a line feed."""
        self._unfinished: set[object] = set()
        """Writers that have begun a line and not ended it, whether or not another has written since."""

    def place(self, writer: object, text: bytes, prefix: bytes = b"") -> bytes:
        """The bytes to write so that ``text`` does not run into another writer's line.

        Args:
            writer: who writes; compared by identity or value.
            text: whole lines, or a line or piece of one that goes on. Not empty.
            prefix: stands before a piece that starts a new line of the output; ``text`` has its own elsewhere.
        """
        same = self._last == writer and self._last is not None
        placed = text
        if not same:
            if writer in self._unfinished:
                placed = prefix + CONTINUED + text
            if self._last is not None:
                placed = b"\n" + placed
        if text.endswith(b"\n"):
            self._last = None
            self._unfinished.discard(writer)
        else:
            self._last = writer
            self._unfinished.add(writer)
        return placed

    def end(self, writer: object) -> bytes:
        """The bytes to write when a writer has ended: a line feed if its unfinished line stands at the end."""
        at_end = self._last == writer and self._last is not None
        self._unfinished.discard(writer)
        if at_end:
            self._last = None
        return b"\n" if at_end else b""


def complete(text: bytes) -> int:
    """The number of bytes of ``text`` that do not belong to a UTF-8 character whose end is missing."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte & 0xC0 == 0x80:  # a continuation byte: its first byte is further back
            continue
        length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return len(text) - back if length > back else len(text)
    return len(text)


class LineReader:
    """Makes lines of the bytes of a log as they come.

    Args:
        longest: bytes of a line after which its pieces are lines of their own, all but the first marked.
    """

    def __init__(self, longest: int = LONGEST_READ) -> None:
        self._longest = longest
        self._held: list[bytes] = []
        self._size = 0
        self._goes_on = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take bytes; the lines that have ended, each with its line feed."""
        start = 0
        while (end := data.find(b"\n", start) + 1) > 0:
            self._held.append(data[start:end])
            yield self._piece()
            self._goes_on = False
            start = end
        if start < len(data):
            self._held.append(data[start:])
            self._size += len(data) - start
        if self._size > self._longest:
            text = b"".join(self._held)
            end = complete(text)
            self._held = [text[:end], b"\n"]
            yield self._piece()
            self._goes_on = True
            self._held, self._size = [text[end:]], len(text) - end

    def drawn(self) -> bytes:
        """The part of an unfinished line that a carriage return has begun: a progress bar, as it stands; b"" for none.

        A carriage return at the end is held: it comes before the next picture, or belongs to the line's end.
        """
        if not any(b"\r" in piece for piece in self._held):
            return b""
        text = b"".join(self._held)
        end = complete(text.rstrip(b"\r"))
        self._held, self._size = [text[end:]], len(text) - end
        return text[:end]

    def rest(self) -> bytes:
        """The line that has no end, when there is no more to come; b"" for none."""
        return self._piece() if self._size else b""

    def _piece(self) -> bytes:
        lead = CONTINUED if self._goes_on else b""
        piece = lead + b"".join(self._held)
        self._held, self._size = [], 0
        return piece
