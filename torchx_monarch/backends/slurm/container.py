# SPDX-License-Identifier: BSD-3-Clause
"""Run the steps of a job in containers of pyxis (enroot).

A role's step is in its container: task, host and ranks. The batch step is not. The job's folder and the working
directory are mounted under their own paths, so that every path of the request means the same inside and outside.
Standard library only, because the batch step imports this.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from dataclasses import dataclass

from torchx_monarch.backends.core.state_files import path_name
from torchx_monarch.backends.slurm.folder import JobFolder
from torchx_monarch.system import safe_files


@dataclass(frozen=True)
class Mount:
    """A path of the node that containers see.

    Attributes:
        source: the path on the node.
        target: the path in the container.
        read_only: whether the container may not write there.
    """

    source: str
    target: str
    read_only: bool = False


@dataclass(frozen=True)
class Container:
    """The containers of a role's step, one on each node.

    Attributes:
        image: the image in enroot's spelling, or the path of a squashfs file.
        cwd: the working directory.
        mounts: what they see of the node, beside the job's folder.
    """

    image: str
    cwd: str
    mounts: list[Mount]

    def options(self, job: str) -> dict[str, str]:
        """Return the srun options of the step.

        Args:
            job: the job's folder.
        """
        # Each folder before those inside of it, which it would hide.
        mounts = sorted([*self.mounts, Mount(job, job)], key=lambda mount: mount.target.rstrip("/").count("/"))
        words = [f"{mount.source}:{mount.target}{':ro' if mount.read_only else ''}" for mount in mounts]
        return {
            "container-image": self.image,
            "container-mounts": ",".join(words),
            "container-workdir": self.cwd,
        }

    def task_script(self, paths: JobFolder, role: str) -> str:
        """Return the step's command: a script that finds Python and this package in the container, and runs the task.

        It has the arguments of ``in_job.task``. Without Python it writes the task's record itself: exit code 78
        (EX_CONFIG), which no retry helps.

        Args:
            paths: the job's folder.
        """
        lines = [
            "# FOLDER ROLE JOBID RESTART",
            "umask 077",
            "fail() {\n"
            "  PATH=$PATH:/usr/bin:/bin\n"
            f'  logs={shlex.quote(paths.logs)}/{shlex.quote(path_name(role))}/"$SLURM_PROCID"\n'
            '  mkdir -p "$logs"\n'
            '  printf \'{"id": %d, "job_restart": %d, "restarts": %d, "state": "FAILED", "exit_code": 78, '
            '"error": "%s", "hostname": "%s"}\' "$SLURM_PROCID" "$4" "$4" "$5" "$SLURMD_NODENAME" '
            '> "$logs/replica.json.new"\n'
            '  mv "$logs/replica.json.new" "$logs/replica.json"\n'
            "  exit 78\n}",
            f"command -v python > /dev/null || {_fail(f'the image {self.image} has no python on its PATH')}",
        ]
        reason = f"the image {self.image} has no torchx-monarch, or another version of it (pip install torchx-monarch)"
        lines.append(f"python -I -c {shlex.quote(_FIND)} || {_fail(reason)}")
        return "\n".join([*lines, f'exec python -I -m {_MODULE} task "$@"', ""])


_MODULE = "torchx_monarch.backends.slurm.in_job.entrypoint"

_FIND = f'import importlib.util as u, sys; sys.exit(not u.find_spec("torchx_monarch") or not u.find_spec("{_MODULE}"))'


def _fail(reason: str) -> str:
    """Return the command that ends a task, for a reason."""
    error = json.dumps({"message": {"message": reason, "errorCode": os.EX_CONFIG}})
    escaped = json.dumps(error)[1:-1]  # the record has the error as JSON text
    return f'{{ echo {shlex.quote(reason)} >&2; fail "$@" {shlex.quote(escaped)}; }}'


_READ = 16 * 1024
"""Bytes of the job's log that are searched for an error."""

_ERROR = re.compile(r"(?:\d+: |(?=srun: |slurmstepd))(?:(?:srun|slurmstepd[\w.-]*): error: )?(.*\S)")
"""A line of a task, which its number precedes, or an error of srun or slurmstepd."""

_AFTERWARDS = re.compile(
    r"Exited with exit code|^(task \d+|spank)[:_ ]|to unblock task|STEP \d|JOB \d|Terminating|_try_parse|plugin stack"
)
"""Errors of srun and slurmstepd that follow from another one."""


def last_error(job_log: str) -> str:
    """Return the last error that srun, slurmstepd or pyxis has written; empty if none is found.

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
