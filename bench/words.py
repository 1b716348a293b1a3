# SPDX-License-Identifier: BSD-3-Clause
"""How the benchmarks print what they have measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def spread(values: Sequence[float], digits: int = 3) -> str:
    """The median, with the least and the greatest."""
    middle, least, greatest = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({least}-{greatest})"
