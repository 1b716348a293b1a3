# SPDX-License-Identifier: BSD-3-Clause
"""The delays between restarts of a job's ranks or hosts. Standard library only."""

from __future__ import annotations

_FIRST_DELAY = 1.0
"""Upper limit in seconds of the delay before the second restart in a row. It doubles with each further restart."""

_MAX_DELAY = 60.0

_LIVED = 60.0
"""Seconds after which an attempt has made progress, so that its failure does not continue the previous one."""


class Backoff:
    """The delays between restarts, so that a program that fails immediately does not spin.

    The first restart is immediate, and so is the first one after an attempt that ran for a minute. The delays of
    further restarts double, up to a minute. Each delay is drawn from the upper half of its range, so that jobs that
    failed by a common cause do not all restart at the same moment.
    """

    def __init__(self) -> None:
        self._in_a_row = 0

    def delay(self, lived: float) -> float:
        """Return the seconds to wait before the next attempt, after one that ran for ``lived`` seconds."""
        if lived >= _LIVED:
            self._in_a_row = 0
        self._in_a_row += 1
        if self._in_a_row == 1:
            return 0.0
        import random  # here: a supervisor imports this module, and rarely waits

        longest = min(_MAX_DELAY, _FIRST_DELAY * 2.0 ** min(self._in_a_row - 2, 32))
        return random.uniform(longest / 2, longest)


def describe(delay: float, lived: float) -> str:
    """Return a line for the job's log about a delay, which ``Backoff.delay`` has returned for this ``lived``."""
    return f"the restart waits {delay:.1f} s: the last attempt failed after {lived:.1f} s"
