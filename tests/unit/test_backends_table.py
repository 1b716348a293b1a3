# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The table of docs/backends.md: what it is made of, and that the page's own can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusters import table
from tests.clusters.scenarios import BACKENDS, REASONS, SCENARIOS

PAGE = Path(__file__).parents[2] / "docs" / "backends.md"

FIRST, *REST = SCENARIOS


def test_a_cell_is_what_was_tried_or_the_reason() -> None:
    host_network = {name: {"fake"} for name in REST}
    host_network[REST[0]].add("real")
    cells = table.column("slurm", host_network, {FIRST: "there is none"})
    assert cells[FIRST] == "not possible, because there is none"
    assert (cells[REST[0]], cells[REST[1]]) == ("tested real", "tested on a fake wire")


def test_a_cell_without_a_test_or_with_a_needless_reason_is_an_error() -> None:
    host_network = {name: {"real"} for name in REST}
    with pytest.raises(ValueError, match=f"{FIRST!r} has neither a test nor a reason"):
        table.column("slurm", host_network, {})
    with pytest.raises(ValueError, match=f"{REST[0]!r} has a test, and a reason for none"):
        table.column("slurm", host_network, {FIRST: "x", REST[0]: "y"})


def test_columns_are_replaced_and_others_stay() -> None:
    page = "before\n<!-- table: begin -->\n<!-- table: end -->\nafter\n"
    every = {name: "tested real" for name in SCENARIOS}
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


def test_reasons_are_for_known_cells() -> None:
    assert set(REASONS) == set(BACKENDS)
    for reasons in REASONS.values():
        assert set(reasons) <= set(SCENARIOS)
        assert not any("|" in reason for reason in reasons.values())
