# SPDX-License-Identifier: BSD-3-Clause
"""The contract of all backends on monarch_sge."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence

import pytest

from tests.clusters.packages import skip_for
from tests.clusters.sge.cluster import ENVIRON, GridEngine, missing
from tests.contract.batch import BatchContract
from tests.contract.place import BatchPlace
from tests.waits import WITHIN
from torchx_monarch.schedulers import monarch_sge

pytestmark = [pytest.mark.slow, pytest.mark.nightly("the example on the same base runs the contract every time")]


@pytest.fixture(scope="session")
def cluster() -> Iterator[GridEngine]:
    """Yield the cluster. Where there can be none the test is skipped; in CI that is a mistake, and fails it."""
    skip_for(missing())
    cluster = GridEngine()
    try:
        yield cluster.up()
    finally:
        cluster.down()


def qstat(*words: str) -> str:
    return subprocess.run(["qstat", *words], capture_output=True, text=True, timeout=WITHIN, check=False).stdout


class SgePlace(BatchPlace):
    """Grid Engine on this machine."""

    name = "monarch_sge"
    factory = staticmethod(monarch_sge)
    install = "gridengine-client"
    submit, held = "qsub", "-h"
    request_function = "torchx_monarch.backends.batch.backend:BatchBackend.run"
    cannot = {"preemption": "its jobs are not started again (qsub -r n)"}

    def is_read(self, *request: object) -> bool:
        """Return whether a command only answers."""
        command = request[1]
        assert isinstance(command, list)
        return bool(command[0] == "qstat")

    @contextlib.contextmanager
    def pending(self) -> Iterator[str]:
        """Submit a job that is held."""
        yield self.run(self.role("true", replicas=2), submit_args=self.held)

    def shown(self) -> str:
        """Return what Grid Engine shows of its jobs."""
        return qstat("-j", "*")

    def left(self, handle: str) -> Sequence[object]:
        """Return files of the app, and its jobs."""
        queue = qstat("-xml")
        return [*super().left(handle), *([queue] if handle.rpartition("/")[2] in queue else [])]


class TestContract(BatchContract):
    kind = SgePlace

    @pytest.fixture(autouse=True)
    def environ(self, cluster: GridEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in ENVIRON.items():
            monkeypatch.setenv(name, value)
