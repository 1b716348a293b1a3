# SPDX-License-Identifier: BSD-3-Clause
"""Group the numbers of replicas or ranks into ranges: a message or a line must not grow with the job."""

from __future__ import annotations

from collections.abc import Iterable


def consecutive(numbers: Iterable[int]) -> list[list[int]]:
    """Return the ranges of consecutive numbers, each as its first and last number, in the order of the numbers."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ranges
