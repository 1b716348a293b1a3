# SPDX-License-Identifier: BSD-3-Clause
"""The real ``torch.distributed.run`` shows a script what the forked one of the tests does; the list of differences."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.differences import Difference, render
from tests.conformance.launchers import REPORT, Launchers

OBSERVE = (
    REPORT
    + """
import signal
report({
    "env": dict(os.environ),
    "argv": sys.orig_argv,
    "path": sys.path,
    "cwd": os.getcwd(),
    "status": [line for line in open("/proc/self/status") if line.startswith(("SigB", "SigI", "SigC", "NoNew"))],
    "signals": [repr(signal.getsignal(n)) for n in (1, 2, 3, 10, 12, 13, 15)],
    "leader": os.getsid(0) == os.getpid(),
    "descriptors": sorted(os.listdir("/proc/self/fd")),
    "umask": os.umask(0o22),
})
print("out")
sys.exit(3 * int(os.environ["RANK"]))
"""
)

EVERY_TIME = ("MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID")
"""Variables that are new in every launch."""


def _lasting(reports: dict[int, Any]) -> dict[int, Any]:
    assert reports.keys() == {0, 1}
    for report in reports.values():
        for name in EVERY_TIME:
            del report["env"][name]
    return reports


@pytest.mark.torchrun
@pytest.mark.parametrize("form", ["script", "module"])
def test_forked_torchrun_is_torchrun(form: str, both: Launchers, tmp_path: Path) -> None:
    program = ["pkg/observe.py"] if form == "script" else ["-m", "pkg.observe"]
    words = ["--nproc-per-node", "2", *program, '--x=a b"c,$d', "", "é\n"]
    theirs, ours = both(words, {"pkg/observe.py": OBSERVE}, preload="", live=True)
    assert ours.code == 3
    real = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        cwd=tmp_path / "work",
        env=dict(os.environ),  # and not what readline has added to the C library's
        stdin=subprocess.DEVNULL,
        capture_output=True,
        start_new_session=True,
        timeout=240,
        check=False,
    )
    observed = Path(os.environ["OBSERVED"])
    reports = {int(path.name): json.loads(path.read_text()) for path in observed.iterdir()}
    assert real.returncode == theirs.code == 1
    assert sorted(real.stdout) == sorted(theirs.out)  # torchrun lets the lines of two ranks tear each other
    forked = _lasting(theirs.reports)
    for rank, report in _lasting(reports).items():
        assert {
            name: (value, forked[rank][name]) for name, value in report.items() if value != forked[rank][name]
        } == {}


HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "explanation" / "differences.md"


def test_page_holds_the_list() -> None:
    table = "".join(line for line in PAGE.read_text().splitlines(keepends=True) if line.startswith("|"))
    assert table == render(), "run `python -m tests.conformance.differences` and put its table into the page"


@pytest.mark.parametrize("difference", Difference, ids=lambda difference: difference.name)
def test_difference_is_tested(difference: Difference) -> None:
    modules = [path for path in HERE.glob("test_*.py") if path.name != Path(__file__).name]
    modules.append(HERE.with_name("local") / "test_hangs.py")
    assert any(f"Difference.{difference.name}" in path.read_text() for path in modules)
