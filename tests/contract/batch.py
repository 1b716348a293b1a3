# SPDX-License-Identifier: BSD-3-Clause
"""The contract of backends for batch systems, of which an app has several jobs."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torchx.specs import AppState

from tests.contract.contract import Contract
from tests.contract.place import BatchPlace
from tests.waits import WITHIN

_SUBMITS = """
import sys
from torchx.runner import Runner
from torchx.specs import AppDef, Role
from torchx_monarch import schedulers
name = sys.argv[1]
roles = [Role(f"r{k}", image="", entrypoint="sleep", args=["1000"]) for k in range(4)]
Runner("torchx", {name: getattr(schedulers, name)}).run(AppDef("app", roles), name, cfg={"submit_args": sys.argv[2]})
"""

_KILLS = """\
#!/bin/sh
echo >>{calls}
[ $(wc -l <{calls}) = 3 ] || exec {submit} "$@"
{submit} "$@"
kill -9 $PPID
"""


class BatchContract(Contract):
    def test_the_jobs_of_a_killed_submitter_are_known(
        self, place: BatchPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The submitter is killed when its third job is in the queue, whose id it has not read, before its fourth."""
        submit = shutil.which(place.submit)
        kills = tmp_path / "kills" / place.submit
        kills.parent.mkdir()
        kills.write_text(_KILLS.format(calls=tmp_path / "calls", submit=submit))
        kills.chmod(0o755)
        with monkeypatch.context() as patch:
            patch.setenv("PATH", str(kills.parent), prepend=":")
            command = [sys.executable, "-c", _SUBMITS, place.name, place.held]
            done = subprocess.run(command, timeout=WITHIN, check=False, capture_output=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        ((handle, _),) = place.listed()
        place.adopt(handle)
        app_id = handle.rpartition("/")[2]
        assert app_id in place.torchx("monarch", "ls")
        assert set(place.states(handle).values()) == {AppState.PENDING}
        snapshot = place.backend.snapshot(app_id)
        assert snapshot is not None
        waits = [replica.waiting for replica in snapshot.replicas]
        assert waits[0] == waits[2] != waits[3] and "not submitted yet" in waits[3]
        assert place.shown().count(app_id) >= 3
        place.torchx("cancel", app_id)
        place.wait(handle, AppState.CANCELLED)
        place.until(lambda: app_id not in place.shown(), "an empty queue", handle)
