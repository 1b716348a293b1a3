# SPDX-License-Identifier: BSD-3-Clause
"""Hosts in containers of pyxis, by a stand-in that notes what it is asked for."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from torchx.specs import AppState, BindMount

from tests.clusters.slurm.apps import Apps, sh
from tests.clusters.slurm.cluster import SlurmCluster


@pytest.mark.scenario("containers: pyxis", wire="stub")
def test_pyxis_is_given_image_mounts_and_folder(
    apps: Apps, cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "data").mkdir()
    given, target = str(tmp_path / "data"), str(tmp_path / "there")
    check = f"import os; print(os.getcwd()); open({target!r} + '/x', 'w')"
    mounts = [BindMount(given, target, read_only=True)]
    role = apps.torchrun(apps.program(check), nproc=1, image="ghcr.io/me/image:1", mounts=mounts, max_retries=1)
    with monkeypatch.context() as within:
        within.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        handle = apps.run(role, container="pyxis")
    status = apps.wait(handle, AppState.FAILED)
    assert status.num_restarts == 1
    assert "Read-only file system" in json.loads(status.structured_error_msg)["message"]["message"]
    assert f"{tmp_path}/work\n" in apps.log(handle)  # either rank may be the first to fail, and the other is stopped
    job = apps.paths(handle).root
    binds = sorted([f"{tmp_path}/work:{tmp_path}/work", f"{given}:{target}:ro", f"{job}:{job}"])
    for line in cluster.pyxis_notes.read_text().splitlines()[-2:]:
        image, told, workdir = line.split("|")
        assert (image, sorted(told.split(",")), workdir) == ("ghcr.io#me/image:1", binds, f"{tmp_path}/work")


@pytest.mark.scenario("containers: pyxis", wire="stub")
def test_an_image_that_pyxis_cannot_import_is_the_cause(apps: Apps) -> None:
    role = sh("true")
    role.image = "missing"
    status = apps.wait(apps.run(role, container="pyxis"), AppState.FAILED)
    assert status.msg.endswith("no container of missing has started: pyxis: failed to import docker image"), status.msg
