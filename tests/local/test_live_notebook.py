# SPDX-License-Identifier: BSD-3-Clause
"""examples/live.ipynb, executed as a person would: take hosts, run, change the code, run again, look at a failure."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from torchx.runner import get_runner
from torchx.specs import AppState

NOTEBOOK = Path(__file__).parents[2] / "examples" / "live.ipynb"


@pytest.mark.slow
@pytest.mark.nightly("13 s of processor time; the clients that it uses are tested in test_serve.py and test_live.py")
def test_the_notebook_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    work = tmp_path / "work"
    work.mkdir()
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    try:
        resources = {"metadata": {"path": str(work)}}
        NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    finally:
        with get_runner() as runner:
            states = []
            for app in runner.list("monarch_local"):
                states.append(app.state)
                runner.cancel(app.app_handle)
                runner.wait(app.app_handle, wait_interval=0.1)
    said = [
        "".join(output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    everything = "\n".join(said)
    first, second, third = map(float, re.findall(r"accuracy (0\.\d+) after \d+ steps on 2 ranks", everything))
    assert second > first and third > 0.85  # the changed code has run, and then the arguments
    assert "rank 1 on " in everything and "ValueError: rank 1 has had enough (exit code 1)" in everything
    assert "failed ranks: [1]" in everything
    assert 'raise ValueError("rank 1 has had enough")' in everything  # the traceback
    slow, fast = map(float, re.findall(r"\[\(0\.1, (0\.\d+)\), \(2\.0, (0\.\d+)\)\]", everything)[0])
    assert fast > slow > 0.5  # what the function returned in the two ranks
    succeeded = ", ".join(f"({run}, 'succeeded', 0)" for run in range(1, 5))
    runs = f"[{succeeded}, (5, 'failed', 1)]"
    assert runs in " ".join(everything.split())
    assert said[-1] == "'SUCCEEDED'"
    assert states == [AppState.SUCCEEDED]


def test_its_outputs_are_those_of_a_run_from_top_to_bottom() -> None:
    """Stored by ``python -m tests.local.record_notebook``."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all(cell.outputs for cell in code)
    everything = "".join(str(cell.outputs) for cell in code)
    assert len(re.findall(r"'\d+\.\d+ s'", everything)) >= 3  # the time of each run
    assert "error" not in [output.output_type for cell in code for output in cell.outputs]
    assert "warning:" not in everything and str(Path(__file__).parents[2]) not in everything
