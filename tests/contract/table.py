# SPDX-License-Identifier: BSD-3-Clause
"""What every backend is tested for: the table of docs/reference/backends.md, which ``python -m tests.contract.table``
writes.

``Contract`` has a test for each scenario, marked ``@pytest.mark.scenario("retries")``. A backend's further tests may be
marked as well, with the wire that they use: ``@pytest.mark.scenario("retries", wire="fake")``. The table is made of
these marks and of what each ``Place`` declares impossible (``Place.cannot``).
"""

from __future__ import annotations

import importlib
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SCENARIOS = (
    "two hosts, digits",
    "lost host replaced",
    "spare host",
    "cancel while pending",
    "cancel while running",
    "stacks of running ranks",
    "breakpoint on another host",
    "actors beside ranks",
    "attach to a batch job",
    "attach during a run",
    "function on hosts that stay",
    "status and log long after, elsewhere",
    "describe gives the original app",
    "list once each",
    "reading changes nothing",
    "delete leaves nothing",
    "root cause in status",
    "retries",
    "retry policies of commands",
    "elastic role",
    "groups restart alone",
    "ends by itself",
    "command at the end",
    "environment arrives whole",
    "preemption",
    "credentials not on show",
    "log follow, since, until",
    "queue for a machine",
    "bad options named",
    "missing tool says what to install",
    "containers: pyxis",
)

BACKENDS = ("local", "docker", "slurm", "ssh", "sge", "pbs", "lsf", "htcondor", "kubernetes", "aws_batch")
"""The rows: the folders of tests/clusters, unless ``_ELSEWHERE`` has the path."""

_STAND_INS = "tests/clusters/batch"
_ELSEWHERE = {
    "local": "tests/local/test_contract.py",
    "pbs": _STAND_INS,
    "lsf": _STAND_INS,
    "htcondor": _STAND_INS,
}

WIRES = {
    "real": "real",
    "api-server": "API server",
    "moto+docker": "moto",
    "stub": "stub",
    "stand-in": "stand-in",
    "fake": "fake wire",
}
"""How the table names a test's ``wire``. Where tests of one cell differ, the first of these counts."""

_ROOT = Path(__file__).parents[2]
PAGE = _ROOT / "docs" / "reference" / "backends.md"
_BEGIN, _END = "<!-- table: begin -->\n", "<!-- table: end -->\n"


def marks(test: Any) -> Iterator[tuple[str, str]]:
    """Yield the scenarios that a test is marked with, and its wire; empty for the backend's own."""
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "scenario":
            (name,) = mark.args
            yield name, mark.kwargs.get("wire", "")


def column(backend: str) -> dict[str, str]:
    """Return on which wire each scenario of a backend is tested, or ``no: REASON``."""
    wires, reasons = defaultdict[str, set[str]](set), dict[str, str]()
    for module in _modules(backend):
        for value in vars(module).values():
            for name, wire in () if isinstance(value, type) else marks(value):
                wires[name].add(WIRES[wire])
            place = getattr(value, "kind", None)
            if place is None or place.name != f"monarch_{backend}":  # another one on the same cluster
                continue
            for test in (getattr(value, each) for each in dir(value) if each.startswith("test_")):
                for name, wire in marks(test):
                    if reason := place.cannot.get(name) or place.cannot.get(test.__name__):
                        reasons[name] = reason
                    else:
                        wires[name].add(WIRES[wire or place.wires.get(name, place.wire)])
    assert wires.keys() | reasons.keys() <= set(SCENARIOS)
    reasons.setdefault("containers: pyxis", "Slurm's")
    reasons.setdefault("queue for a machine", "not its option")
    return {
        name: next((text for text in WIRES.values() if text in wires[name]), "") or f"no: {reasons[name]}"
        for name in SCENARIOS
    }


def _modules(backend: str) -> Iterator[Any]:
    """Yield the test modules of a backend's scenarios."""
    path = Path(_ELSEWHERE.get(backend, f"tests/clusters/{backend}"))
    for file in sorted((_ROOT / path).glob("test_*.py")) or [_ROOT / path]:
        yield importlib.import_module(".".join(file.relative_to(_ROOT).with_suffix("").parts))


def written(page: str, columns: Mapping[str, Mapping[str, str]]) -> str:
    """Return the page with the table of these columns: the usual wire of each backend, and what is not tested on it."""
    rows = [["backend", "usually", "otherwise", "not tested"]]
    for name, cells in columns.items():
        usual = Counter(cells.values()).most_common(1)[0][0]
        others = defaultdict[str, list[str]](list)
        for scenario, cell in cells.items():
            if cell not in (usual, "no: Slurm's", "no: not its option"):
                others[cell].append(scenario)
        otherwise = [f"{cell}: {', '.join(names)}" for cell, names in others.items() if not cell.startswith("no: ")]
        untested = [f"{', '.join(names)} ({cell[4:]})" for cell, names in others.items() if cell.startswith("no: ")]
        rows.append([f"`monarch_{name}`", usual, "; ".join(otherwise), "; ".join(untested)])
    scenarios = textwrap.fill(f"{'; '.join(SCENARIOS)}.", 120)
    head, *body = (f"| {' | '.join(row)} |\n" for row in rows)
    table = "".join([f"{scenarios}\n\n", head, "|---|---|---|---|\n", *body])
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    return before + begin + table + end + after


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), {name: column(name) for name in BACKENDS}))
