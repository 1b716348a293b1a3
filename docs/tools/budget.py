# SPDX-License-Identifier: BSD-3-Clause
"""Fail if a package has outgrown its budget: ``python -m docs.tools.budget``, a part of ``make lint``.

The budget is the table in docs/architecture/README.md. A commit that raises a number there says why.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PAGE = _ROOT / "docs" / "architecture" / "README.md"
_ROW = re.compile(r"^\| `([\w/]+)` \| ([\d,]+) \| ([\d,]+) \|$", re.MULTILINE)


def size(folder: Path) -> tuple[int, int]:
    """Return the number of lines and of files of the Python code in a folder."""
    files = sorted(folder.rglob("*.py"))
    return sum(len(file.read_text().splitlines()) for file in files), len(files)


def main() -> int:
    """Print each package that is above its budget; return the exit code."""
    excess = []
    for name, *limits in _ROW.findall(_PAGE.read_text()):
        for count, limit, unit in zip(size(_ROOT / name), limits, ("lines", "files"), strict=True):
            if count > int(limit.replace(",", "")):
                excess.append(f"{name} has {count:,} {unit}, and its budget is {limit} (docs/architecture/README.md)")
    print("\n".join(excess), end="\n" if excess else "")
    return 1 if excess else 0


if __name__ == "__main__":
    sys.exit(main())
