# SPDX-License-Identifier: BSD-3-Clause
"""The contract of all backends on monarch_sge."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.clusters.sge.cluster import ENVIRON, GridEngine, missing
from tests.contract.contract import Contract
from tests.contract.place import Place
from tests.waits import WITHIN
from torchx_monarch.backends.batch.folder import JobFolder
from torchx_monarch.schedulers import monarch_sge

pytestmark = [pytest.mark.slow, pytest.mark.nightly("the example on the same base runs the contract every time")]


@pytest.fixture(scope="session")
def cluster() -> Iterator[GridEngine]:
    """Yield the cluster. Where there can be none the test is skipped; in CI that is a mistake, and fails it."""
    reason = missing()
    if reason:
        (pytest.fail if "CI" in os.environ else pytest.skip)(reason)
    cluster = GridEngine()
    try:
        yield cluster.up()
    finally:
        cluster.down()


def qstat(*words: str) -> str:
    return subprocess.run(["qstat", *words], capture_output=True, text=True, timeout=WITHIN, check=False).stdout


class SgePlace(Place):
    """Grid Engine on this machine."""

    name = "monarch_sge"
    factory = staticmethod(monarch_sge)
    install = "gridengine-client"
    own_bad_options = (({"submit_args": "'"}, "`submit_args` is '"),)
    request_function = "torchx_monarch.backends.batch.backend:run_command"
    cannot = {"preemption": "its jobs are not started again (qsub -r n)"}

    def is_read(self, *request: object) -> bool:
        """Return whether a command only answers."""
        command = request[0]
        assert isinstance(command, list)
        return bool(command[0] == "qstat")

    def folder_of(self, handle: str) -> JobFolder:
        """Return the folder of an app."""
        return JobFolder(f"{self.backend.root}/{handle.rpartition('/')[2]}")  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def pending(self) -> Iterator[str]:
        """Submit a job that is held."""
        yield self.run(self.role("true", replicas=2), submit_args="-h")

    def credentials(self, handle: str) -> tuple[str, str]:
        """Return the request, and what Grid Engine shows."""
        folder = self.folder_of(handle)
        return Path(folder.request).read_text(), qstat("-j", "*") + Path(folder.app).read_text()

    def left(self, handle: str) -> Sequence[object]:
        """Return files of the app, and its jobs."""
        app_id = handle.rpartition("/")[2]
        queue = qstat("-xml")
        return [*Path(self.folder_of(handle).root).rglob("*"), *([queue] if app_id in queue else [])]

    def message_without_client(self) -> str:
        """Return what a submission says without Grid Engine's commands."""
        with pytest.MonkeyPatch.context() as without:
            without.setenv("PATH", "/nonexistent")
            with pytest.raises(RuntimeError) as caught:
                self.run(self.role("true"))
        return str(caught.value)


class TestContract(Contract):
    kind = SgePlace

    @pytest.fixture
    def place(
        self, cluster: GridEngine, leaves_nothing: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> Iterator[SgePlace]:
        for name, value in ENVIRON.items():
            monkeypatch.setenv(name, value)
        place = SgePlace(tmp_path)
        yield place
        place.close()
