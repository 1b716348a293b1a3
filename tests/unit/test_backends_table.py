# SPDX-License-Identifier: BSD-3-Clause
"""The table of docs/reference/backends.md: what its cells say, and that the page's own can be read."""

from __future__ import annotations

from pathlib import Path

from tests.contract import table
from tests.contract.contract import Contract
from tests.contract.scenarios import BACKENDS, ONLY, SCENARIOS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "backends.md"

FIRST, *REST = SCENARIOS


def test_the_contract_has_a_test_of_each_scenario() -> None:
    tests = [test for name, test in vars(Contract).items() if name.startswith("test_")]
    marks = [mark for test in tests for mark in getattr(test, "pytestmark", ())]
    assert {mark.args[0] for mark in marks if mark.name == "scenario"} == set(SCENARIOS) - set(ONLY)


def test_the_page_has_every_scenario_and_nothing_else() -> None:
    columns = table.read(PAGE.read_text())
    assert set(columns) <= set(BACKENDS)
    for cells in columns.values():
        assert tuple(cells) == SCENARIOS


def test_the_example_is_short() -> None:
    """A backend for a batch system is at most 50 lines, and the page shows it."""
    example = (PAGE.parents[2] / "examples" / "task_spooler.py").read_text()
    assert len(example.splitlines()) <= 50
    assert example in (PAGE.parents[1] / "how_to" / "write_a_backend.md").read_text()
