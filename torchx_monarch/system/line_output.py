# SPDX-License-Identifier: BSD-3-Clause
"""Keep the lines of several writers apart in one output, and split lines that are too long to hold.

An unfinished line is normally held until it ends, so that the lines of two writers never mix. Two kinds cannot be held:
a line longer than ``LONGEST``, and a progress bar, which is redrawn after a carriage return. Both are written in
pieces. If another writer's line comes between two pieces, the next piece starts a new line, marked with ``CONTINUED``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

LONGEST = 64 * 1024
"""The maximum bytes of an unfinished line that are held."""

MAX_LINE_BYTES = 1024 * 1024
"""The maximum bytes of a line that the reader of a log gets in one piece."""

CONTINUED = b"[continued] "
"""Marks a piece of a line that does not directly follow the earlier pieces."""

_LINES = re.compile(r"[^\n]*\n|[^\n]+")


def lines_of(text: str) -> list[str]:
    """Split a text after its line feeds, and after no other character that ends lines elsewhere."""
    return _LINES.findall(text)


class LineOutput:
    """Track how the last line of an output ends, to decide what must precede the next text."""

    def __init__(self) -> None:
        self._last: object = None
        """The writer of the unfinished line at the end of the output; None if the output ends in a line feed."""
        self._unfinished: set[object] = set()
        """Writers of unfinished lines, whether or not another writer has written since."""

    def place(self, writer: object, text: bytes, prefix: bytes = b"") -> bytes:
        """Return the bytes to write so that ``text`` does not run into another writer's line.

        Args:
            text: whole lines, or part of a line that continues later. Not empty.
            prefix: goes before a piece that starts a new line of the output; ``text`` contains all other prefixes.
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
        """Return the bytes to write when a writer has ended: a line feed if the output ends in its unfinished line."""
        at_end = self._last == writer and self._last is not None
        self._unfinished.discard(writer)
        if at_end:
            self._last = None
        return b"\n" if at_end else b""


def complete(text: bytes | bytearray) -> int:
    """Return the number of bytes of ``text`` without an incomplete UTF-8 character at the end."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte & 0xC0 == 0x80:  # a continuation byte: the character's first byte is further back
            continue
        length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return len(text) - back if length > back else len(text)
    return len(text)


class LineReader:
    """Split the bytes of a log into lines as they arrive.

    Attributes:
        position: how many of the bytes fed so far are in the pieces that were returned.

    Args:
        longest: the bytes of a line after which it is split; each piece becomes a line, all but the first marked.
    """

    def __init__(self, longest: int = MAX_LINE_BYTES) -> None:
        self.position = 0
        self._fed = 0
        self._longest = longest
        self._held = [b""]  # the first bytes may go on with a line
        self._size = 0
        self._goes_on = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take bytes and yield the lines that have ended: one that earlier bytes may have begun, then all others."""
        start, before = 0, self._fed
        self._fed += len(data)
        first = data.find(b"\n") + 1 if self._held else 0
        for end in (first, data.rfind(b"\n") + 1):
            if end > start:
                self._held.append(data[start:end])
                self.position = before + end
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
            self.position = self._fed - (len(text) - end)
            yield self._piece()
            self._goes_on = True
            self._held, self._size = [text[end:]], len(text) - end

    def pending_progress(self) -> bytes:
        """Return the part of an unfinished line that uses carriage returns, such as a progress bar; b"" if none does.

        A carriage return at the end is held: it precedes the next drawing, or belongs to the line's end.
        """
        if not any(b"\r" in piece for piece in self._held):
            return b""
        text = b"".join(self._held)
        end = complete(text.rstrip(b"\r"))
        self._held, self._size = [text[end:]], len(text) - end
        self.position = self._fed - self._size
        return text[:end]

    def rest(self) -> bytes:
        """Return the last, unfinished line when the log has ended; b"" if the log ends in a line feed."""
        self.position = self._fed
        return self._piece() if self._size else b""

    def _piece(self) -> bytes:
        lead = CONTINUED if self._goes_on else b""
        piece = lead + b"".join(self._held)
        self._held, self._size = [], 0
        return piece
