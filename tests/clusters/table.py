# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The table of docs/backends.md, scenario by backend, from a test run: a pytest plugin, loaded by tests/conftest.py.

A run in which everything of a backend's folder was collected and has passed gives the column of that backend. With
``--backends-table PATH`` it is written there, and other columns stay as they are; otherwise the run says so when the
page has another column, and fails only when a cell has neither tests nor a reason. A run of a part (``-k``, single
files) or with skipped tests neither writes nor compares it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from pathlib import Path

import pytest

from tests.clusters import scenarios
from tests.clusters.scenarios import BACKENDS, REASONS, SCENARIOS, WIRES

_TESTS = Path(__file__).parents[1]
_PAGE = _TESTS.parent / "docs" / "backends.md"
_BEGIN, _END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
_PROPERTY = "scenario"

Column = dict[str, str]
"""The text of each cell, by scenario."""


def folder(backend: str) -> Path:
    """Where a backend's tests are."""
    return _TESTS / "local" if backend == "local" else _TESTS / "clusters" / backend


def column(backend: str, host_network: Mapping[str, Iterable[str]], reasons: Mapping[str, str]) -> Column:
    """The cells of a backend.

    Args:
        host_network: of the tests that have passed, by scenario.
        reasons: why there is none.

    Raises:
        ValueError: a cell has neither tests nor a reason, or both.
    """
    cells, wrong = {}, []
    for name in SCENARIOS:
        tried = set(host_network.get(name, ()))
        if bool(tried) is (name in reasons):
            wrong.append(f"{name!r} has {'a test, and a reason for none' if tried else 'neither a test nor a reason'}")
        elif tried:
            cells[name] = next(text for wire, text in WIRES.items() if wire in tried)
        else:
            cells[name] = f"not possible, because {reasons[name]}"
    if wrong:
        raise ValueError(f"{backend} (tests/clusters/scenarios.py): {'; '.join(wrong)}")
    return cells


def read(page: str) -> dict[str, Column]:
    """The columns of a page, by backend; none when it has no table."""
    _, _, rest = page.partition(_BEGIN)
    lines = [line for line in rest.partition(_END)[0].splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    if len(rows) < 3:
        return {}
    names = [cell.strip("`").removeprefix("monarch_") for cell in rows[0]]
    return {name: {row[0]: row[at] for row in rows[2:]} for at, name in enumerate(names) if at}


def written(page: str, columns: Mapping[str, Column]) -> str:
    """The page with these columns in its table in place of those that it has."""
    every = {**read(page), **columns}
    names = [name for name in BACKENDS if name in every]
    rows = [["scenario", *(f"`monarch_{name}`" for name in names)], ["---"] * (len(names) + 1)]
    rows += [[scenario, *(every[name].get(scenario, "") for name in names)] for scenario in SCENARIOS]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"the page has no lines {_BEGIN.strip()} and {_END.strip()} to put the table between")
    return before + begin + table + end + after


class Table:
    """Collects what a run has tried."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._passed: dict[str, dict[str, set[str]]] = {}
        self._partial: set[str] = set()
        self._message = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Check the marks, and have the reports carry them, also from another process."""
        for item in items:
            for mark in item.iter_markers("scenario"):
                name, wire = mark.args[0] if len(mark.args) == 1 else "", mark.kwargs.get("wire", "real")
                backend = next((one for one in BACKENDS if folder(one) in item.path.parents), "")
                if not backend or name not in SCENARIOS or wire not in WIRES:
                    raise pytest.UsageError(
                        f"{item.nodeid}: scenario({name!r}, wire={wire!r}): only tests of {', '.join(BACKENDS)} are "
                        "marked so, with a name of SCENARIOS in tests/clusters/scenarios.py and a wire out of "
                        f"{', '.join(WIRES)}"
                    )
                item.user_properties.append((_PROPERTY, f"{backend}|{wire}|{name}"))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what has passed, and what was skipped."""
        for key, value in report.user_properties:
            if key == _PROPERTY:
                backend, wire, name = str(value).split("|", 2)
                if report.outcome != "passed":
                    self._partial.add(backend)
                elif report.when == "call":
                    self._passed.setdefault(backend, {}).setdefault(name, set()).add(wire)

    def _is_whole(self, backend: str) -> bool:
        """Whether all tests of a backend that are part of a scenario were run."""
        options, own = self._config.option, folder(backend)
        if options.keyword or options.markexpr not in ("", "scenario"):
            return False
        if getattr(options, "lf", False) or options.deselect:
            return False
        within = [Path(self._config.invocation_params.dir, arg) for arg in options.ignore or ()]
        if options.ignore_glob or any(one == own or one in own.parents or own in one.parents for one in within):
            return False
        asked = [Path(self._config.invocation_params.dir, arg) for arg in self._config.args]
        return backend in self._passed and any(one == own or one in own.parents for one in asked)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the columns that this run gives, or compare them."""
        if exitstatus != pytest.ExitCode.OK or hasattr(session.config, "workerinput"):
            return
        path = session.config.getoption("--backends-table")
        page = Path(path or _PAGE)
        try:
            columns = {
                backend: column(backend, self._passed[backend], REASONS[backend])
                for backend in BACKENDS
                if backend not in self._partial and self._is_whole(backend)
            }
            if path:
                page.write_text(written(page.read_text(), columns))
                said = f"the columns {', '.join(columns)}" if columns else "nothing, for no backend's folder ran whole,"
                self._message = f"{page} was given {said} of this run"
                return
            theirs = read(page.read_text())
            # The page is of the clusters that the tests bring up; on another one a run may well come out better.
            stale = [one for one in columns if theirs.get(one) != columns[one] and one not in scenarios.elsewhere()]
        except ValueError as error:
            self._message = str(error)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            return
        if stale:
            self._message = (
                f"{page} is not what this run says of {', '.join(stale)}; write it with --backends-table {page}"
            )

    @pytest.hookimpl(wrapper=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
        """Say so."""
        yield
        if self._message:
            terminalreporter.section("docs/backends.md")
            terminalreporter.line(self._message)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backends-table", metavar="PATH", help="write what was tested of each backend into that page")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Table(config))
