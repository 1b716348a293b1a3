# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Hosts in containers: OCI bundles by a real crun, and pyxis by a stand-in that notes what it is asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torchx.specs import AppState, BindMount
from torchx.specs.finder import ComponentValidationException

from tests.clusters.slurm import bundles
from tests.clusters.slurm.apps import Apps, sh
from tests.clusters.slurm.cluster import SlurmCluster

STARTS = """
    import os, signal, sys, time
    def stop(number, frame):
        os.write(1, b"saved\\n")
        sys.exit(0)
    signal.signal(signal.SIGTERM, stop)
    starts = os.path.join("/given", "starts" + os.environ["RANK"])
    open(starts, "a").write("x")
    count = len(open(starts).read())
    with open("/proc/1/cmdline") as file:
        first = "in_job.entrypoint" in file.read()
    try:
        open("/here", "w")
    except OSError:
        print("read-only", flush=True)
    print("start", count, os.uname().nodename, os.environ["OF_IMAGE"], os.environ["OF_ROLE"], first, flush=True)
    if count == 1 and os.environ["RANK"] == "0":
        while not os.path.exists("/given/starts1"):
            time.sleep(0.05)
        sys.exit(3)
    time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def leaves_no_container(apps: Apps, cluster: SlurmCluster) -> Iterator[None]:
    yield
    apps.close()
    assert cluster.runtime_list() == []


@pytest.mark.scenario("containers: OCI bundles")
def test_a_job_in_containers_is_retried_queued_again_and_cancelled(
    apps: Apps, cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # containers see the folder of the submission
    image = bundles.make(tmp_path / "image", f"{bundles.PYTHON}:/usr/bin:/bin", env={"OF_IMAGE": "ours"})
    before = (image / "config.json").read_text()
    (tmp_path / "kept").mkdir()
    mounts = [BindMount(str(tmp_path / "kept"), "/given")]
    more: dict[str, Any] = {"image": str(image), "mounts": mounts, "env": {"OF_ROLE": "a b"}, "max_retries": 1}
    handle = apps.run(apps.torchrun(apps.program(STARTS), nproc=1, **more), container="oci")
    for replica in (0, 1):
        apps.wait_for_output(handle, f"start 2 n{replica + 1} ours a b True", replica)
        assert "read-only" in apps.output(handle, replica)
    assert len(cluster.runtime_list()) == 2
    assert apps.status(handle).num_restarts == 1
    apps.preempt(handle, 0)
    for replica in (0, 1):
        apps.wait_for_output(handle, "start 3", replica)
    apps.runner.cancel(handle)
    status = apps.wait(handle, AppState.CANCELLED)
    assert {one.hostname for one in status.roles[0].replicas} == {"n1", "n2"}
    for replica in (0, 1):
        assert apps.output(handle, replica).count("saved") >= 2  # at the preemption, and at the end
    assert (image / "config.json").read_text() == before


@pytest.mark.scenario("containers: OCI bundles")
@pytest.mark.parametrize(
    ("path", "programs", "cause"),
    [
        ("/bin", True, "has no python on its PATH"),
        ("{folder}:/usr/bin:/bin", True, "has no torchx-monarch"),
        ("/bin", False, "no container of {image} has started: executable file `/bin/sh` not found"),
    ],
)
def test_a_job_says_what_an_image_lacks(apps: Apps, tmp_path: Path, path: str, programs: bool, cause: str) -> None:
    folder = tmp_path / "programs"
    folder.mkdir()
    (folder / "python").symlink_to("/bin/false")  # a Python in which nothing can be found
    image = bundles.make(tmp_path / "image", path.format(folder=folder), programs)
    role = sh("true", max_retries=1)
    role.image, role.mounts = str(image), [BindMount(str(folder), str(folder), read_only=True)]
    status = apps.wait(apps.run(role, container="oci"), AppState.FAILED)
    assert status.num_restarts == (0 if programs else 1)  # another start helps no image without a program
    assert cause.format(image=image) in status.msg + status.structured_error_msg


@pytest.mark.scenario("containers: OCI bundles")
def test_a_node_without_a_runtime_fails_the_job(apps: Apps, cluster: SlurmCluster, tmp_path: Path) -> None:
    """Slurm ignores the container there, and would run the task on the node itself."""
    role = sh("true")
    role.image = str(bundles.make(tmp_path / "image", f"{bundles.PYTHON}:/usr/bin:/bin"))
    conf = cluster.conf.with_name("oci.conf")
    aside = conf.rename(conf.with_name("aside.conf"))
    try:
        with pytest.raises(ComponentValidationException, match="there is no .*oci.conf"):
            apps.run(role, container="oci")
        with pytest.MonkeyPatch.context() as unchecked:
            unchecked.setattr("torchx_monarch.backends.slurm.checks._lack", lambda kind: "")
            handle = apps.run(role, container="oci")
        status = apps.wait(handle, AppState.FAILED)
    finally:
        aside.rename(conf)
    assert "the node has no oci.conf" in status.structured_error_msg


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
    role = apps.torchrun(apps.program(check), nproc=1, image="ghcr.io/me/image:1", mounts=mounts)
    with monkeypatch.context() as within:
        within.setenv("PATH", f"{bundles.PYTHON}:{os.environ['PATH']}")
        handle = apps.run(role, container="pyxis")
    status = apps.wait(handle, AppState.FAILED)
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
