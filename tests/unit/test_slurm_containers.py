# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Containers of Slurm's steps: their options, the configuration derived from a bundle, the cluster's checks."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from torchx.runner import Runner
from torchx.specs import (
    AppDef,
    BindMount,
    DeviceMount,
    InvalidRunConfigException,
    Role,
    VolumeMount,
)
from torchx.specs.finder import ComponentValidationException

from tests.waits import WITHIN
from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.backends.slurm import bundle, checks, container_files, native, records
from torchx_monarch.backends.slurm.container import Mount, in_order, last_error
from torchx_monarch.backends.slurm.folder import JobFolder
from torchx_monarch.backends.slurm.native import SlurmError
from torchx_monarch.backends.slurm.request import SlurmRequest
from torchx_monarch.model import codec
from torchx_monarch.schedulers import monarch_slurm

CONFIG: dict[str, Any] = {
    "process": {"terminal": True, "args": ["sh"], "env": ["PATH=/opt/bin", "QUOTE=it's"], "user": {"uid": 7}},
    "root": {"path": "fs", "readonly": True},
    "hostname": "box",
    "mounts": [{"destination": "/etc/", "type": "bind", "source": "/somewhere"}],
    "linux": {"namespaces": [{"type": "pid"}, {"type": "network"}, {"type": "uts"}, {"type": "mount"}]},
}


@pytest.fixture
def image(tmp_path: Path) -> Path:
    (tmp_path / "image" / "fs").mkdir(parents=True)
    (tmp_path / "image" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "image"


def request(image: object, *mounts: object, entrypoint: str = "torchrun", **cfg: Any) -> SlurmRequest:
    role = Role("trainer", str(image), entrypoint=entrypoint, args=["train.py"], mounts=list(mounts))
    with Runner("torchx", {"monarch_slurm": monarch_slurm}) as runner:
        found: SlurmRequest = runner.dryrun(AppDef("app", [role]), "monarch_slurm", cfg=cfg).request
    return found


def test_an_oci_step_runs_the_derived_bundle(image: Path) -> None:
    found = request(image, container="oci")
    folder = JobFolder(found.folder).container(0)
    step = found.step(0)
    assert f"--container={folder}" in step and f"--task-prolog={folder}/prolog.sh" in step
    assert step[-4:] == ["/bin/sh", f"{folder}/task.sh", found.folder, "trainer"]
    assert found.roles[0].command[:3] == ["python", "-m", "torchx_monarch.host"]
    assert f"--container={folder}" in str(found)
    # The batch step runs on the node, with the submitter's interpreter, and reads the request.
    assert found.starter[0] == sys.executable
    assert codec.decode(SlurmRequest, asdict(found)) == found
    assert f"--container={folder.replace(found.folder, '/else')}" in found.renamed("/else").step(0)


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("me/image:1", "me/image:1"),
        ("ghcr.io/me/image:1", "ghcr.io#me/image:1"),
        ("localhost/image", "localhost#image"),
        ("host:5000/a/b", "host:5000#a/b"),
        ("nvcr.io#nvidia/pytorch:24.01", "nvcr.io#nvidia/pytorch:24.01"),
        ("dockerd://me/image", "dockerd://me/image"),
    ],
)
def test_pyxis_gets_enroots_names(image: str, name: str) -> None:
    assert f"--container-image={name}" in request(image, container="pyxis").step(0)


def test_pyxis_gets_mounts_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mounts = (BindMount("/a", "/b/c/d", read_only=True), DeviceMount("/dev/x", "/dev/y"))
    found = request("me/image", *mounts, container="pyxis")
    (told,) = [word for word in found.step(0) if word.startswith("--container-mounts=")]
    binds = told.partition("=")[2].split(",")
    assert {f"{tmp_path}:{tmp_path}", f"{found.folder}:{found.folder}", "/a:/b/c/d:ro", "/dev/x:/dev/y"} == set(binds)
    assert f"--container-workdir={tmp_path}" in found.step(0)


def test_a_copied_workspace_is_the_folder_and_not_the_image(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    role = Role("trainer", "me/image", entrypoint="torchrun", args=["train.py"])
    cfg = {"container": "pyxis", "job_dir": str(tmp_path / "job")}
    with Runner("torchx", {"monarch_slurm": monarch_slurm}) as runner:
        app = AppDef("app", [role])
        found = runner.dryrun(app, "monarch_slurm", cfg=cfg, workspace=str(tmp_path / "ws")).request
    assert found.roles[0].cwd == str(tmp_path / "job")
    assert found.roles[0].image == "me/image"


@pytest.mark.parametrize("name", ["a,b", "a:b"])
def test_pyxis_refuses_a_folder_that_it_cannot_mount(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"pyxis cannot mount the job's folder {tmp_path}/{name}"):
        request("me/image", container="pyxis", job_dir=str(tmp_path / name))


def test_bundles_keep_what_the_user_wrote() -> None:
    device = Mount("/dev/null", "/dev/zilch", device={"type": "c", "major": 1, "minor": 3}, access="rw")
    before = json.dumps(CONFIG)
    derived = bundle.derive(CONFIG, [Mount("/data", "/given", read_only=True), device])
    assert json.dumps(CONFIG) == before
    assert derived["root"] == {"path": "rootfs", "readonly": True}
    assert [one["type"] for one in derived["linux"]["namespaces"]] == ["pid", "mount"]
    assert "hostname" not in derived and derived["process"]["terminal"] is False
    assert derived["process"]["user"] == {"uid": 7}
    # /etc is mounted already; hosts need a /tmp that they can write, and that hides nothing of the bundle below it.
    assert [one["destination"] for one in derived["mounts"]] == ["/tmp", "/etc/", "/given"]
    assert derived["mounts"][-1]["options"] == ["rbind", "ro"]
    (allowed,) = derived["linux"]["resources"]["devices"]
    assert allowed == {"allow": True, "access": "rw", "type": "c", "major": 1, "minor": 3}
    assert derived["linux"]["devices"][0]["path"] == "/dev/zilch"
    assert "/etc/hosts" in [one["destination"] for one in bundle.derive({}, [])["mounts"]]


def test_folders_are_mounted_before_what_is_in_them() -> None:
    given = [Mount("a", "/a/b/c"), Mount("b", "/a/"), Mount("c", "/z/y")]
    assert [one.target for one in in_order(given)] == ["/a/", "/z/y", "/a/b/c"]


@pytest.mark.parametrize("restart", [0, 2])
def test_a_task_without_python_leaves_its_record(image: Path, tmp_path: Path, restart: int) -> None:
    container = request(image, container="oci").roles[0].container
    assert container is not None
    paths = JobFolder(str(tmp_path / "job"))
    container_files.write(paths, 0, "trainer", container, is_array=False)
    folder = Path(paths.container(0))
    assert (folder / "rootfs").resolve() == image / "fs"
    (folder / "is_inside").write_text("yes\n")  # as in the container
    env = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "3", "SLURMD_NODENAME": "n4", "PATH": "/usr/bin:/bin"}
    subprocess.run([folder / "prolog.sh"], env=env, check=True, timeout=WITHIN)
    words = ["/bin/sh", str(folder / "task.sh"), paths.root, "trainer", "7", str(restart)]
    # The batch step's number is in the environment of an OCI container, and not the task's.
    done = subprocess.run(words, env={**env, "SLURM_PROCID": "0"}, capture_output=True, text=True, timeout=WITHIN)
    assert (done.returncode, done.stderr) == (78, f"the image {image} has no python on its PATH\n")
    record = records.read_task(paths, "trainer", 3)
    assert record is not None
    assert (record.id, record.job_restart, record.exit_code, record.hostname) == (3, restart, 78, "n4")
    assert "has no python" in str(record.error)


@pytest.mark.parametrize(
    ("image", "mount", "cfg", "reason"),
    [
        ("", None, "oci", "needs an image that has torchx-monarch, and it names none"),
        ("ghcr.io/pytorch/torchx:0.9", None, "pyxis", "TorchX's default image"),
        ("/nonexistent", None, "oci", "/nonexistent/config.json: No such file"),
        ("/nonexistent/x.sqsh", None, "pyxis", "there is no image /nonexistent/x.sqsh"),
        ("me/image", BindMount("/a,b", "/c"), "pyxis", "paths must have neither ':' nor ','"),
        ("me/image", VolumeMount("v", "/c"), "pyxis", "another kind than bind and device"),
        ("IMAGE", DeviceMount("/dev/nonexistent", "/dev/x"), "oci", "has no device /dev/nonexistent"),
    ],
)
def test_what_no_container_can_be_made_of_is_refused(
    image: str, mount: object, cfg: str, reason: str, tmp_path: Path
) -> None:
    if image == "IMAGE":
        (tmp_path / "rootfs").mkdir()
        (tmp_path / "config.json").write_text("{}")
        image = str(tmp_path)
    with pytest.raises(ComponentValidationException, match=reason):
        request(image, *([mount] if mount else []), container=cfg)


@pytest.mark.parametrize(
    ("text", "reason"), [("[", "is no JSON"), ("[]", "is no conf"), ('{"mounts": {}}', "is no conf")]
)
def test_damaged_bundles_are_refused(image: Path, text: str, reason: str) -> None:
    (image / "config.json").write_text(text)
    with pytest.raises(ComponentValidationException, match=reason):
        request(image, container="oci")


def test_a_bundle_without_a_root_is_refused(image: Path) -> None:
    (image / "fs").rmdir()
    with pytest.raises(ComponentValidationException, match="has no root filesystem"):
        request(image, container="oci")


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(InvalidRunConfigException, match="`container` is 'docker'; allowed are pyxis and oci"):
        request("me/image", container="docker")


def test_what_is_not_used_without_containers_is_said(image: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "torchx_monarch"):
        assert request(image).roles[0].cwd == str(image)
        assert request("me/image").roles[0].container is None
        request("", BindMount("/a", "/b"))
        request("/tmp")
    texts = [record.getMessage() for record in caplog.records if record.name.startswith("torchx_monarch")]
    assert [word in text for word, text in zip(("OCI bundle", "is not used", "mounts"), texts, strict=True)] == [
        True
    ] * 3


@pytest.mark.parametrize(
    ("kind", "help_text", "conf", "reason"),
    [
        ("pyxis", "--container-image=X", "", ""),
        ("pyxis", "--container  X", "", "pyxis is not installed"),
        ("oci", "--container-image=X", "oci.conf", "slurm-wlm 20.02 has no containers"),
        ("oci", "--container  X", "", "there is no .*oci.conf"),
        ("oci", "--container  X", "oci.conf", ""),
    ],
)
def test_clusters_without_containers_are_told_before_submission(
    kind: str, help_text: str, conf: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {
        "srun": help_text,
        "sinfo": "slurm-wlm 20.02\n",
        "scontrol": f"Configuration data\nSLURM_CONF = {tmp_path}/slurm.conf\n",
    }
    (tmp_path / "slurm.conf").touch()
    if conf:
        (tmp_path / conf).touch()

    def run(command: Sequence[str], timeout: float = 0) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(list(command), 0, answers[command[0]], "")

    monkeypatch.setattr(native, "run", run)
    if not reason:
        checks.check_containers([kind])
        return
    with pytest.raises(SlurmError, match=f"cannot run -cfg container={kind}: .*{reason}"):
        checks.check_containers([kind])


@pytest.mark.parametrize(
    ("log", "error"),
    [
        ("", ""),
        ("job 7 runs on n1\nsrun: error: n1: task 0: Exited with exit code 1\n", ""),
        (
            "0: executable file `/bin/sh` not found\nsrun: error: n1: task 0: Exited with exit code 1\n",
            "executable file `/bin/sh` not found",
        ),
        (
            "0: slurmstepd-n1: error: pyxis: no such image\n0: slurmstepd-n1: error: spank: x failed\n",
            "pyxis: no such image",
        ),
        (
            "0: slurmstepd-n1: error: pyxis: no such image\n"
            "slurmstepd-n1: error: write to unblock task 0 failed: Broken pipe\n",
            "pyxis: no such image",
        ),
        ("srun: error: Unable to create step for job 7\nrole r ended with code 1\n", "Unable to create step for job 7"),
    ],
)
def test_the_error_before_all_that_follows_from_it(log: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(log)
    assert last_error(str(tmp_path / "job.log")) == error
