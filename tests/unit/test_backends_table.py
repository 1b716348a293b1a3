# SPDX-License-Identifier: BSD-3-Clause
"""The table of docs/reference/backends.md: what its cells say, and that the page's own can be read."""

from __future__ import annotations

from pathlib import Path

from tests.contract import table
from tests.contract.contract import Contract
from tests.contract.scenarios import BACKENDS, ONLY, SCENARIOS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "backends.md"

FIRST, *REST = SCENARIOS


def test_a_cell_is_what_was_tested_or_the_reason() -> None:
    tested = {name: {"fake"} for name in REST[:-1]}
    tested[REST[0]].add("real")
    cells = table.column(tested, {FIRST: "there is none", REST[0]: "a part is impossible"})
    assert cells[FIRST] == "not possible, because there is none"
    assert (cells[REST[0]], cells[REST[1]], cells[REST[-1]]) == ("real", "fake wire", "not tested")


def test_the_contract_has_a_test_of_each_scenario() -> None:
    tests = [test for name, test in vars(Contract).items() if name.startswith("test_")]
    marks = [mark for test in tests for mark in getattr(test, "pytestmark", ())]
    assert {mark.args[0] for mark in marks if mark.name == "scenario"} == set(SCENARIOS) - set(ONLY)


def test_columns_are_replaced_and_others_stay() -> None:
    page = "before\n<!-- table: begin -->\n<!-- table: end -->\nafter\n"
    every = {name: "real" for name in SCENARIOS}
    page = table.written(page, {"slurm": every})
    page = table.written(page, {"docker": every, "slurm": {**every, FIRST: "not possible, because (a, b)"}})
    assert page.startswith("before\n") and page.endswith("after\n")
    columns = table.read(page)
    assert list(columns) == ["docker", "slurm"]
    assert columns["docker"] == every
    assert columns["slurm"][FIRST] == "not possible, because (a, b)"


def test_the_page_has_every_scenario_and_nothing_else() -> None:
    columns = table.read(PAGE.read_text())
    assert set(columns) <= set(BACKENDS)
    for cells in columns.values():
        assert tuple(cells) == SCENARIOS


def test_the_example_is_short() -> None:
    """A backend with its fixture is at most 150 lines."""
    files = ("examples/process_backend.py", "tests/contract/test_example.py")
    assert sum(len((PAGE.parents[2] / file).read_text().splitlines()) for file in files) <= 150
