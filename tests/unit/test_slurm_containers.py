# SPDX-License-Identifier: BSD-3-Clause
"""Containers of Slurm's steps: their options, their script, the cluster's checks."""

from __future__ import annotations

import logging
import os
import shlex
import sys
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

from torchx_monarch.backends.slurm.backend import SlurmBackend
from torchx_monarch.backends.slurm.batch_step import last_error
from torchx_monarch.backends.slurm.request import SlurmRequest
from torchx_monarch.model import codec
from torchx_monarch.schedulers import monarch_slurm


def request(image: object, *mounts: object, entrypoint: str = "torchrun", **cfg: Any) -> SlurmRequest:
    role = Role("trainer", str(image), entrypoint=entrypoint, args=["train.py"], mounts=list(mounts))
    with Runner("torchx", {"monarch_slurm": monarch_slurm}) as runner:
        found: SlurmRequest = runner.dryrun(AppDef("app", [role]), "monarch_slurm", cfg=cfg).request
    return found


def test_a_step_runs_the_task_with_the_images_python() -> None:
    found = request("me/image", container="pyxis")
    start = ["python", "-I", "-m", "torchx_monarch.backends.entrypoint", "batch.task"]
    assert found.step(0)[-8:] == [*start, found.folder, "0", "SLURM_PROCID-0"]
    assert found.roles[0].command[:3] == ["python", "-m", "torchx_monarch.host"]
    assert "--container-image=me/image" in SlurmBackend().show(found)
    # The batch step runs on the node, with the submitter's interpreter, and reads the request.
    assert shlex.join([sys.executable, "-I", "-S"]) in found.script
    assert codec.decode(SlurmRequest, asdict(found)) == found


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


def test_folders_are_mounted_before_what_is_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = (BindMount("/a", "/a/b/c/d"), BindMount("/b", "/a/"), BindMount("/c", "/z/y/x"))
    monkeypatch.chdir("/")
    found = request("me/image", *mounts, container="pyxis", job_dir="/y")
    binds = f"/b:/a/,{found.folder}:{found.folder},/c:/z/y/x,/a:/a/b/c/d"
    assert found.roles[0].srun["container-mounts"] == binds


@pytest.mark.parametrize(
    ("image", "mount", "reason"),
    [
        ("", None, "needs an image that has torchx-monarch, and it names none"),
        ("ghcr.io/pytorch/torchx:0.9", None, "TorchX's default image"),
        ("/nonexistent/x.sqsh", None, "there is no image /nonexistent/x.sqsh"),
        ("me/image", VolumeMount("v", "/c"), "another kind than bind and device"),
    ],
)
def test_what_no_container_can_be_made_of_is_refused(image: str, mount: object, reason: str) -> None:
    with pytest.raises(ComponentValidationException, match=reason):
        request(image, *([mount] if mount else []), container="pyxis")


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(InvalidRunConfigException, match="`container` is 'oci'; allowed is pyxis"):
        request("me/image", container="oci")


def test_an_image_that_is_not_used_without_containers_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "torchx_monarch"):
        assert request(tmp_path).roles[0].cwd == str(tmp_path)
        assert request("me/image").roles[0].image_name == ""
    texts = [record.getMessage() for record in caplog.records if record.name.startswith("torchx_monarch")]
    assert texts == ["role 'trainer': the image me/image is not used: -cfg container=pyxis runs containers"]


@pytest.mark.parametrize(
    ("log", "error"),
    [
        ("", ""),
        ("job 7 runs on n1\nsrun: error: n1: task 0: Exited with exit code 1\n", ""),
        (
            "0: /bin/sh: not found\nsrun: error: n1: task 0: Exited with exit code 1\n",
            "/bin/sh: not found",
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
        (
            "srun: unrecognized option '--container-image=x'\nTry \"srun --help\" for more information\nrole r ended\n",
            "srun: unrecognized option '--container-image=x'",
        ),
        ("srun: error: Unable to create step for job 7\nrole r ended with code 1\n", "Unable to create step for job 7"),
    ],
)
def test_the_error_before_all_that_follows_from_it(log: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(log)
    assert last_error(str(tmp_path / "job.log")) == error
    os.mkfifo(tmp_path / "fifo")
    assert last_error(str(tmp_path / "fifo")) == ""
