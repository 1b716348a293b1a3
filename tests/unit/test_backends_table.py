# SPDX-License-Identifier: BSD-3-Clause
"""The table of docs/reference/backends.md, and the example of a backend."""

from __future__ import annotations

from tests.contract.contract import Contract
from tests.contract.table import BACKENDS, PAGE, SCENARIOS, column, marks, written


def test_the_contract_has_a_test_of_each_scenario() -> None:
    tests = [test for name, test in vars(Contract).items() if name.startswith("test_")]
    assert {name for test in tests for name, _ in marks(test)} == set(SCENARIOS) - {"containers: pyxis"}


def test_the_page_says_what_is_tested() -> None:
    columns = {name: column(name) for name in BACKENDS}
    assert written(PAGE.read_text(), columns) == PAGE.read_text(), "run `python -m tests.contract.table`"


def test_the_example_is_short() -> None:
    """A backend for a batch system is at most 50 lines, and the page shows it."""
    example = (PAGE.parents[2] / "examples" / "task_spooler.py").read_text()
    assert len(example.splitlines()) <= 50
    assert example in (PAGE.parents[1] / "how_to" / "write_a_backend.md").read_text()
