# SPDX-License-Identifier: BSD-3-Clause
"""What docs/how_to/from_*.md say to type is taken: commands by TorchX and our schedulers, constructors by Python."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from torchx.cli.main import main
from torchx.runner import get_runner
from torchx.specs import AppDef, Role

DOCS = Path(__file__).parents[2] / "docs" / "how_to"
PAGES = sorted(DOCS.glob("from_*.md"))
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
CODE = {page.name: re.findall(r"`([^`]+)`", BLOCK.sub("", page.read_text())) for page in PAGES}


@pytest.mark.parametrize("page", [page.name for page in PAGES if "torchx run -s" in page.read_text()])
def test_commands_can_be_submitted(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    commands = {code for code in CODE[page] if code.startswith("torchx run -s ")}
    assert commands
    for command in commands:
        words = shlex.split(command.removeprefix("torchx run "))
        main(["run", "--dryrun", *words])
        assert "=== SCHEDULER REQUEST ===" in capsys.readouterr().out, command


def test_constructors_are_taken() -> None:
    from torchx_monarch import MonarchJob

    app = AppDef("app", [Role("trainers", image="my/image", num_replicas=4)])
    ours = [code for code in CODE["from_monarch_job.md"] if code.startswith("MonarchJob(")]
    assert len(ours) >= 3
    for code in ours:
        assert isinstance(eval(code, {"MonarchJob": MonarchJob, "app": app}), MonarchJob)
    for block in BLOCK.findall((DOCS / "from_monarch_job.md").read_text()):
        compile(block, "from_monarch_job.md", "exec")


def test_every_option_of_local_cwd_has_a_place() -> None:
    with get_runner() as runner:
        theirs, ours = (
            {name for name, _ in runner.scheduler_run_opts(scheduler)} for scheduler in ("local_cwd", "monarch_local")
        )
    text = " ".join(CODE["from_torchx.md"])
    assert not [name for name in theirs - ours if f"-cfg {name}=" not in text]
