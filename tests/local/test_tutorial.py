# SPDX-License-Identifier: BSD-3-Clause
"""The program of the tutorial runs as the tutorial shows it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests.fork_server import run_torchx

_SHOWN = r"^```sh\n(torchx run [^\n]*)\n```\n(?:(?!```).)*?```text\n(.*?)^```"
"""A block with one command, and the next one if that shows what it prints."""

_PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()


def normal(text: str) -> str:
    """Return a line without what differs between runs: numbers, the app's id, folders."""
    text = re.sub(r"\S*/torchx-monarch/apps/|\S*/apps/(?=train-)", "STATE/", text)
    text = re.sub(r"\S*/(?=train\.py)", "", re.sub(r"\btrain-\w+", "ID", text))
    return re.sub(r"\d+(\.\d+)?", "N", text).strip()


def test_its_commands_show_what_it_shows(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", _PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    shown = re.findall(_SHOWN, _PAGE, re.MULTILINE | re.DOTALL)
    assert len(shown) == 2
    for (command, lines), code in zip(shown, (0, 1), strict=True):
        ran = run_torchx(*shlex.split(command)[1:], cwd=tmp_path)
        assert ran.returncode == code, ran.stderr
        printed = {normal(line) for line in (ran.stdout + ran.stderr).splitlines()}
        assert {normal(line) for line in lines.splitlines() if line != "…"} <= printed
