# SPDX-License-Identifier: BSD-3-Clause
"""The table of docs/reference/backends.md from a test run: a pytest plugin, loaded by tests/conftest.py.

A run in which all tests of a backend were collected, and none has failed, yields the column of that backend. With
``--backends-table PATH`` the column is written into that page, and other columns stay as they are; otherwise the run
ends with a warning if the page has another column. A run of a part (``-k``, single files) neither writes nor compares.

The plugin also skips the tests of ``Contract`` that a backend declares impossible (``Place.cannot``), and marks those
as nightly that it wants to be (``Place.nightly``). Without these a run yields no cell of their scenarios: they stay.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from pathlib import Path

import pytest

from tests.contract import scenarios
from tests.contract.scenarios import BACKENDS, SCENARIOS, WIRES

_TESTS = Path(__file__).parents[1]
PAGE = _TESTS.parent / "docs" / "reference" / "backends.md"
_BEGIN, _END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
_TESTED, _CANNOT, _NIGHTLY = "scenario", "cannot", "nightly"

Column = dict[str, str]
"""The text of each cell, by scenario."""


def folder(backend: str) -> Path:
    """Return where the tests of a backend's scenarios are."""
    return _TESTS / "local" / "test_contract.py" if backend == "local" else _TESTS / "clusters" / backend


def column(tested: Mapping[str, Iterable[str]], reasons: Mapping[str, str]) -> Column:
    """Return the cells of a backend.

    Args:
        tested: the wires of the tests that have passed, by scenario.
        reasons: why tests were skipped, by scenario; counts where no other test of the scenario has passed.
    """
    cells = {}
    for name in SCENARIOS:
        wires = set(tested.get(name, ()))
        untested = f"not possible, because {reasons[name]}" if name in reasons else "not tested"
        cells[name] = next((text for wire, text in WIRES.items() if wire in wires), untested)
    return cells


def read(page: str) -> dict[str, Column]:
    """Return the columns of a page, by backend; none if it has no table."""
    _, _, rest = page.partition(_BEGIN)
    lines = [line for line in rest.partition(_END)[0].splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    if len(rows) < 3:
        return {}
    names = [cell.strip("`").removeprefix("monarch_") for cell in rows[0]]
    return {name: {row[0]: row[at] for row in rows[2:]} for at, name in enumerate(names) if at}


def written(page: str, columns: Mapping[str, Column]) -> str:
    """Return the page with these columns in its table, in place of those that it has.

    Raises:
        ValueError: the page has no place for the table.
    """
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
    """Collects what a run has tested."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._tested: dict[str, dict[str, set[str]]] = {}
        self._reasons: dict[str, dict[str, str]] = {}
        self._partial: set[str] = set()
        self._nightly: set[tuple[str, str]] = set()
        self._message = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Check the marks, mark what is not for this run, and have the reports carry both, also from another process.

        Raises:
            UsageError: a test that is not of a backend is marked, or its mark has an unknown name or wire.
        """
        for item in items:
            if item.get_closest_marker("scenario") is None:
                continue
            place = getattr(getattr(item, "cls", None), "kind", None)
            own = place is None or place.is_registered  # others run on a cluster of a backend and are none of it
            backend = next((one for one in BACKENDS if own and folder(one) in (item.path, *item.path.parents)), "")
            test = getattr(item, "originalname", item.name)
            for mark in item.iter_markers("scenario"):
                name = mark.args[0] if len(mark.args) == 1 else ""
                default = place.wires.get(name, place.wire) if place else "real"
                wire = mark.kwargs.get("wire", default)
                if not (backend or place) or name not in SCENARIOS or wire not in WIRES:
                    raise pytest.UsageError(
                        f"{item.nodeid}: scenario({name!r}, wire={wire!r}): only tests of the contract and of "
                        f"{', '.join(BACKENDS)} are marked so, with a name of SCENARIOS in tests/contract/scenarios.py "
                        f"and a wire out of {', '.join(WIRES)}"
                    )
                nightly = place.nightly if place else {}
                for key in {name, test, item.name}.intersection(nightly):
                    item.add_marker(pytest.mark.nightly(nightly[key]))
                reason = (place.cannot.get(name) or place.cannot.get(test)) if place else None
                if reason:
                    item.add_marker(pytest.mark.skip(reason=reason))
                if backend:
                    property = (
                        (_CANNOT, f"{backend}|{name}|{reason}") if reason else (_TESTED, f"{backend}|{name}|{wire}")
                    )
                    item.user_properties.append(property)
                    if not self._config.option.nightly:
                        item.user_properties += [(_NIGHTLY, f"{backend}|{one}") for one in SCENARIOS if one in nightly]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what has passed, and what was skipped and why."""
        cannot = [str(value).split("|", 2) for key, value in report.user_properties if key == _CANNOT]
        for backend, name, reason in cannot:
            self._reasons.setdefault(backend, {})[name] = reason
        for key, value in report.user_properties:
            if key == _NIGHTLY:
                backend, name = str(value).split("|", 1)
                self._nightly.add((backend, name))
            if key == _TESTED:
                backend, name, wire = str(value).split("|", 2)
                if report.outcome == "failed" or (report.outcome == "skipped" and not cannot):
                    self._partial.add(backend)
                elif report.outcome == "passed" and report.when == "call":
                    self._tested.setdefault(backend, {}).setdefault(name, set()).add(wire)

    def _is_whole(self, backend: str) -> bool:
        """Return whether all tests of a backend's scenarios were run."""
        options, own = self._config.option, folder(backend)
        if options.keyword or options.markexpr not in ("", "scenario"):
            return False
        if getattr(options, "lf", False) or options.deselect:
            return False
        within = [Path(self._config.invocation_params.dir, arg) for arg in options.ignore or ()]
        if options.ignore_glob or any(one == own or one in own.parents or own in one.parents for one in within):
            return False
        asked = [Path(self._config.invocation_params.dir, arg) for arg in self._config.args]
        return backend in self._tested and any(one == own or one in own.parents for one in asked)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the columns that this run yields, or compare them."""
        if exitstatus != pytest.ExitCode.OK or hasattr(session.config, "workerinput"):
            return
        path = session.config.getoption("--backends-table")
        page = Path(path or PAGE)
        columns = {
            backend: column(
                self._tested[backend], {**scenarios.others_cannot(backend), **self._reasons.get(backend, {})}
            )
            for backend in BACKENDS
            if backend not in self._partial and self._is_whole(backend)
        }
        theirs = read(page.read_text())
        for backend, name in self._nightly:
            if backend in columns:
                columns[backend][name] = theirs.get(backend, {}).get(name, "not tested")
        if path:
            try:
                page.write_text(written(page.read_text(), columns))
            except ValueError as error:
                self._message = str(error)
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
                return
            said = f"the columns {', '.join(columns)}" if columns else "nothing, for all tests of no backend were run,"
            self._message = f"{page} was given {said} of this run"
            return
        # The page is of the test systems that the tests start; on another one a run may well come out better.
        stale = [one for one in columns if theirs.get(one) != columns[one] and one not in scenarios.elsewhere()]
        if stale:
            self._message = f"{page} differs from this run in {', '.join(stale)}; `python -m tests.contract` writes it"

    @pytest.hookimpl(wrapper=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
        """Show the message."""
        yield
        if self._message:
            terminalreporter.section("docs/reference/backends.md", yellow=True)
            terminalreporter.line(self._message)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backends-table", metavar="PATH", help="write what was tested of each backend into that page")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Table(config))
