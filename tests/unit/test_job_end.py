# SPDX-License-Identifier: BSD-3-Clause
"""The command for the end of a job: what it gets, and what is said of its failure."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from torchx_monarch.insight import job_end
from torchx_monarch.insight.job_end import JobEnd
from torchx_monarch.model.state import State

_END = JobEnd("app-x", "app", State.FAILED, 'it said "no"\n', 3, 1.0, 2.0, 0)


def test_the_command_gets_the_end_as_json(tmp_path: Path) -> None:
    assert _END.run(f"cat > {tmp_path}/end", os.environ) == ""
    got = json.loads((tmp_path / "end").read_text())
    assert (got["id"], got["state"], got["exit_code"], got["message"]) == ("app-x", "FAILED", 3, 'it said "no"\n')


def test_what_fails_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    said = _END.run("echo first >&2; printf 'la\\033[2Jst' >&2; exit 5", os.environ)
    assert said == "the command of -cfg on_end has failed: it exited with code 5: la\\x1b[2Jst"
    assert _END.run("kill -9 $$", os.environ).endswith("failed: it was killed by signal 9 (SIGKILL)")
    assert _END.run("exec sleep 1000 & exit 0", os.environ) == ""  # which does not outlive the command
    monkeypatch.setattr(job_end, "_TIMEOUT", 0.01)
    assert _END.run("sleep 1000", os.environ).endswith("it has not ended within 0.01 s, and was killed")
