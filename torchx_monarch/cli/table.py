# SPDX-License-Identifier: BSD-3-Clause
"""Print a table of text."""

from __future__ import annotations


def print_table(head: list[str], rows: list[list[str]]) -> None:
    """Print rows in columns of equal width."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    for row in [head, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
