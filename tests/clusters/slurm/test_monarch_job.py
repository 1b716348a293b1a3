# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A Monarch client on a login node, and its actors on the nodes of a real Slurm, over mutual TLS."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torchx.specs import AppState

from tests.clusters.slurm.apps import NAME, Apps
from tests.clusters.slurm.cluster import SlurmCluster
from tests.local.monarch_programs import DOCUMENTED, EXPECTED

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("slurm")]


def test_a_program_of_monarchs_documentation(apps: Apps, cluster: SlurmCluster, tmp_path: Path) -> None:
    text = DOCUMENTED.replace("{JOB}", "MonarchJob({'trainers': 2, 'dataloaders': 1}, 'monarch_slurm')")
    text = text.replace("{OTHER}", "MonarchJob({'trainers': 1, 'dataloaders': 1}, 'monarch_slurm')")
    (tmp_path / "client.py").write_text(text)
    # What is a login node knows the nodes by name.
    words = f"mount --bind {cluster.conf.parent}/hosts /etc/hosts; exec {sys.executable} client.py"
    login = ["unshare", "--mount", "sh", "-c", words]
    done = subprocess.run(login, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == EXPECTED
    (app,) = apps.runner.list(NAME)
    assert app.state is AppState.CANCELLED
    lines = apps.log(app.app_handle, 0, role="trainers") + apps.log(app.app_handle, 1, role="trainers")
    assert lines.count("Hello from Monarch") == 4
    assert "INSECURE" not in lines
