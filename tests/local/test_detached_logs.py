# SPDX-License-Identifier: BSD-3-Clause
"""Logs of an app: what is in them, and reading them."""

from __future__ import annotations

from pathlib import Path

import pytest
from torchx.schedulers.api import Stream
from torchx.specs import AppState, Role

from tests.local.detached import Detached, py, sh
from tests.waits import until


@pytest.mark.parametrize("command", ["echo loss", "torchrun --no-python echo loss"])
def test_output_of_a_filter_that_ends_after_the_command(apps: Detached, command: str) -> None:
    """Bash does not wait for such a process, and becomes a last command that is not its own."""
    filtered = "while kill -0 $$ 2>/dev/null; do sleep 0.02; done; sed 's/^/filtered /'"
    app_id = apps.run(Role("r", image="", entrypoint="bash", args=["-c", f"{command} > >({filtered})"]))
    assert apps.wait(app_id).state is AppState.SUCCEEDED
    assert apps.log(app_id, streams=Stream.STDOUT) == ["filtered loss\n"]


def test_bytes_that_are_no_text(apps: Detached) -> None:
    app_id = apps.run(py(r"import os; os.write(1, b'a\xff\xfe\r\x00b\n' + '\u00e9\u65e5'.encode() + b'\n')"))
    apps.wait(app_id)
    assert apps.log(app_id) == ["a\ufffd\ufffd\r\0b\n", "\u00e9\u65e5\n"]


def test_output_of_orphans_is_kept_while_the_app_runs(apps: Detached, tmp_path: Path) -> None:
    (tmp_path / "orphan.sh").write_text(f"while ! test -e {tmp_path}/late; do sleep 0.02; done; echo late")
    role = sh(f"sh {tmp_path}/orphan.sh & exit 0", name="side")
    app_id = apps.run(sh(f"while ! test -e {tmp_path}/end; do sleep 0.02; done", name="main"), role)
    until(lambda: apps.states(app_id)["side/0"] is AppState.SUCCEEDED, "the end of the role")
    (tmp_path / "late").touch()
    until(lambda: apps.log(app_id, "side") == ["late\n"], "what its child prints after it")
    (tmp_path / "end").touch()
    assert apps.wait(app_id).state is AppState.SUCCEEDED
    assert apps.log(app_id, "side") == ["late\n"]


def test_a_job_whose_orphan_holds_the_pipe_ends(apps: Detached) -> None:
    app_id = apps.run(sh("sleep 1000 & echo done"))
    assert apps.wait(app_id).state is AppState.SUCCEEDED
    assert apps.log(app_id) == ["done\n"]
