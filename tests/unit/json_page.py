# SPDX-License-Identifier: BSD-3-Clause
"""The fields that docs/reference/json.md documents."""

from __future__ import annotations

import re
from pathlib import Path

_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "json.md"


def documented(title: str) -> set[str]:
    """Return the fields in the table with this title: the heading before it, or the first cell of its head."""
    text = _PAGE.read_text()
    found = re.search(rf"(?:^## {title}\n.*?|The object `{title}`:\n\n)^\| field \|.*?\n\n", text + "\n\n", re.M | re.S)
    found = found or re.search(rf"^\| field of {title} \|.*?\n\n", text + "\n\n", re.M | re.S)
    assert found is not None, title
    rows = [line.split("|")[1] for line in found[0].splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}
