# SPDX-License-Identifier: BSD-3-Clause
"""The contract of all backends on TorchX's own scheduler for Slurm, wrapped."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torchx.schedulers.api import Scheduler
from torchx.schedulers.slurm_scheduler import SlurmScheduler

from tests.clusters.slurm.apps import SMALL
from tests.clusters.slurm.cluster import SlurmCluster
from tests.contract.contract import Contract
from tests.contract.place import Place
from tests.contract.wrapped import CANNOT
from tests.waits import WITHIN
from torchx_monarch.client.connection import Target
from torchx_monarch.schedulers import wrap

# With --json, squeue 22.05 ignores -j, and TorchX then takes all jobs of the cluster for parts of the one it describes.
_SQUEUE = """#!{python}
import json, subprocess, sys
words = sys.argv[1:]
found = subprocess.run(["{squeue}", *words], stdout=subprocess.PIPE, text=True)
if found.returncode == 0 and "--json" in words and "-j" in words:
    job_id = int(words[words.index("-j") + 1])
    told = json.loads(found.stdout)
    told["jobs"] = [job for job in told["jobs"] if job_id in (job["job_id"], job["het_job_id"])]
    found.stdout = json.dumps(told)
sys.stdout.write(found.stdout)
sys.exit(found.returncode)
"""


class SlurmPlace(Place):
    """TorchX's ``slurm``, which writes logs into the current folder."""

    name = "wrapped_slurm"
    is_registered = False
    resource = SMALL
    own_bad_options = (({"partitoin": "main"}, "(?s)partitoin.*partition"),)
    install = "sbatch"
    cannot = {name: reason for name, reason in CANNOT.items() if not name.startswith("missing")} | {
        "environment arrives whole": "TorchX's slurm ends the value of a variable at a comma (srun --export)",
        "retries": "TorchX's slurm requeues a job whatever its exit code, and Slurm then holds it for two minutes",
        "credentials not on show": "TorchX's slurm puts the environment on srun's command line",
    }

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster = cluster
        self._before = os.getcwd()
        os.chdir(folder)
        super().__init__(folder)

    def factory(self, session_name: str, **more: Any) -> Scheduler[Any]:
        """Create the scheduler."""
        return wrap(self.name, session_name, SlurmScheduler(session_name))

    @contextlib.contextmanager
    def pending(self) -> Iterator[str]:
        """Submit to nodes that are away."""
        yield self.run(self.role("true", replicas=2), partition="away")

    @contextlib.contextmanager
    def reached(self, handle: str) -> Iterator[str]:
        """Yield the address of the node: this machine does not know the cluster's names."""
        yield self.cluster.reached(Target.from_handle(handle, runner=self.runner).address)

    def close(self) -> None:
        """End what still runs."""
        super().close()
        for app_id in [handle.rpartition("/")[2] for handle in self._handles]:
            subprocess.run(["scancel", "--wait", app_id], check=False, timeout=WITHIN, capture_output=True)
        os.chdir(self._before)


class TestContract(Contract):
    kind = SlurmPlace

    @pytest.fixture
    def place(
        self, cluster: SlurmCluster, leaves_nothing: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> Iterator[SlurmPlace]:
        monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
        squeue = tmp_path / "bin" / "squeue"
        squeue.parent.mkdir()
        squeue.write_text(_SQUEUE.format(python=sys.executable, squeue=shutil.which("squeue")))
        squeue.chmod(0o755)
        monkeypatch.setenv("PATH", str(squeue.parent), prepend=os.pathsep)
        place = SlurmPlace(cluster, tmp_path)
        yield place
        place.close()
