# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Run the steps of a job in containers: pyxis (enroot), or OCI bundles by Slurm itself.

A role's step is in its container: task, host and ranks. The batch step is not. The job's folder and the working
directory are mounted under their own paths, so that every path of the request means the same inside and outside.
Standard library only, because the batch step imports this.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, field
from typing import Any

from torchx_monarch.system import safe_files

KINDS = ("pyxis", "oci")
"""The values of the run option ``container``."""


@dataclass(frozen=True)
class Mount:
    """A path of the node that containers see.

    Attributes:
        source: the path on the node.
        target: the path in the container.
        read_only: whether the container may not write there.
        device: the device's entry in the configuration of an OCI bundle; empty for files and folders.
        access: how the container may use the device: letters out of ``rwm``.
    """

    source: str
    target: str
    read_only: bool = False
    device: dict[str, Any] = field(default_factory=dict)
    access: str = ""


@dataclass(frozen=True)
class Container:
    """The containers of a role's step, one on each node.

    Attributes:
        kind: one of ``KINDS``.
        image: for pyxis the image in enroot's spelling, or the path of a squashfs file; for OCI the bundle's folder.
        cwd: the working directory.
        mounts: what they see of the node, beside the job's folder.
        config: content of the bundle's config.json; empty for pyxis.
    """

    kind: str
    image: str
    cwd: str
    mounts: list[Mount]
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        """The variables of the bundle, which Slurm overrides with those of the batch step; empty for pyxis."""
        words = (self.config.get("process") or {}).get("env") or []
        return dict(word.split("=", 1) for word in words if "=" in word)

    def options(self, job: str, folder: str) -> dict[str, str]:
        """Return the srun options of the step.

        Args:
            job: the job's folder.
            folder: the folder of the role's container in it (``container_files``).
        """
        if self.kind == "oci":
            return {"container": folder, "task-prolog": os.path.join(folder, "prolog.sh")}
        mounts = in_order([*self.mounts, Mount(job, job)])
        words = [f"{one.source}:{one.target}{':ro' if one.read_only else ''}" for one in mounts]
        return {
            "container-image": self.image,
            "container-mounts": ",".join(words),
            "container-workdir": self.cwd,
        }


def in_order(mounts: list[Mount]) -> list[Mount]:
    """Return mounts with each folder before those inside of it, which it would hide."""
    return sorted(mounts, key=lambda one: one.target.rstrip("/").count("/"))


_READ = 16 * 1024
"""Bytes of the job's log that are searched for an error."""

_ERROR = re.compile(r"(?:\d+: |(?=srun: |slurmstepd))(?:(?:srun|slurmstepd[\w.-]*): error: )?(.*\S)")
"""A line of a task, which its number precedes, or an error of srun or slurmstepd."""

_AFTERWARDS = re.compile(
    r"Exited with exit code|^(task \d+|spank)[:_ ]|to unblock task|STEP \d|JOB \d|Terminating|_try_parse|plugin stack"
)
"""Errors of srun and slurmstepd that follow from another one."""


def last_error(job_log: str) -> str:
    """Return the last error that srun, slurmstepd or the runtime of containers has written; empty if none is found.

    Args:
        job_log: the log of the batch step, with the output of its steps, in which the task's number precedes each line.
    """
    with contextlib.suppress(OSError), open(safe_files.open_file(job_log), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _READ))
        for line in reversed(file.read().decode(errors="replace").splitlines()):
            found = _ERROR.match(line)
            if found and not _AFTERWARDS.search(found[1]):
                return found[1][:500]
    return ""
