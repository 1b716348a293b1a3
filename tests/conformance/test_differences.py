# SPDX-License-Identifier: BSD-3-Clause
"""The list of differences: rendered in the documentation, and each entry held by a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.differences import Difference, render

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "explanation" / "differences.md"


def test_page_holds_the_list() -> None:
    table = "".join(line for line in PAGE.read_text().splitlines(keepends=True) if line.startswith("|"))
    assert table == render(), "run `python -m tests.conformance.differences` and put its table into the page"


@pytest.mark.parametrize("difference", Difference, ids=lambda difference: difference.name)
def test_difference_is_tested(difference: Difference) -> None:
    modules = [path for path in HERE.glob("test_*.py") if path.name != Path(__file__).name]
    assert any(f"Difference.{difference.name}" in path.read_text() for path in modules)
