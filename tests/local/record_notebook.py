# SPDX-License-Identifier: BSD-3-Clause
"""Run examples/live.ipynb and store its outputs in it: ``python -m tests.local.record_notebook``, after a change of it.

It runs in a folder of its own, with a state directory of its own, and leaves neither jobs nor files.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "live.ipynb"


def main() -> None:
    """Execute the notebook and write it back with the outputs."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory(prefix="live-") as work:
        os.environ["MONARCH_STATE_DIR"] = os.path.join(work, "state")
        os.environ.pop("TORCHX_CONTEXT_NAME", None)
        resources = {"metadata": {"path": work}}
        NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources, record_timing=False).execute()
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
    NOTEBOOK.write_text(nbformat.writes(notebook))  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
