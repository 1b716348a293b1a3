# SPDX-License-Identifier: BSD-3-Clause
"""One line of a replica's log."""

from __future__ import annotations

from typing import NamedTuple


class TimedLine(NamedTuple):
    """One line of a replica's log.

    Attributes:
        time: when it was written, in seconds since the epoch, as exactly as the backend knows it; 0 if it does not.
        text: the line with its line end. A part of an unfinished line, such as a progress bar, has no line end.
        end: where it ends in the log, in bytes; 0 if the backend does not tell.
    """

    time: float
    text: str
    end: int = 0
