# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The folder of a job, and how any process finds it by the job's id.

Below the state directory (see ``core.state_files``)::

    slurm/jobs/NAME-RANDOM/   the folder, unless the run option job_dir puts it elsewhere
    slurm/ids/JOBID           a symbolic link to it

The folder holds ``app.json`` (the submitted app), ``request.json``, ``job.sh``, ``job.log`` (output of the batch step,
srun and Slurm), ``job.json`` (the batch step's record), ``end.json`` (the final state, for when Slurm has forgotten the
job), ``cancel.json`` (the time of the first cancel), ``events.jsonl``, and ``logs/ROLE/K/`` with the logs, the error
file and the record of each replica, and ``containers/INDEX/`` (``container_files``). Each task of a job array has a
folder ``array/INDEX/`` with the files that belong to one run, and its ``job.log`` is ``array/INDEX.log``.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from torchx_monarch.backends.core import state_files
from torchx_monarch.system.run_dirs import remove_tree

MARK = "torchx-monarch:"
"""Precedes the path of the folder in a job's comment, and marks the job as this scheduler's."""

TRASH = ".trash-"
"""Part of the name of a folder that is being removed."""


class JobFolder(state_files.AppPaths):
    """The paths below a job's folder."""

    @property
    def script(self) -> str:
        return os.path.join(self.root, "job.sh")

    @property
    def job_log(self) -> str:
        return os.path.join(self.root, "job.log")

    @property
    def job(self) -> str:
        return os.path.join(self.root, "job.json")

    @property
    def end(self) -> str:
        return os.path.join(self.root, "end.json")

    def record(self, role: str, replica: int) -> str:
        return os.path.join(self.replica_logs(role, replica), "replica.json")

    def error_file(self, role: str, replica: int) -> str:
        return os.path.join(self.replica_logs(role, replica), "error.json")

    def container(self, role: int) -> str:
        """The files of the container of the role of this index (``container_files``)."""
        return os.path.join(self.root, "containers", str(role))

    @property
    def submitted(self) -> float:
        """When the app was submitted, in seconds since the epoch; 0 if app.json cannot be seen."""
        try:
            return os.stat(self.app).st_mtime
        except OSError:
            return 0.0

    @property
    def whole(self) -> JobFolder:
        """The folder of the whole job: for an array task the array's, otherwise this one."""
        return self

    @property
    def array(self) -> str:
        """The parent of the array tasks' folders."""
        return os.path.join(self.root, "array")

    def begun_tasks(self) -> list[int]:
        """Return the indices of the array tasks that have a folder, in no order; empty if the job is no array."""
        try:
            names = os.listdir(self.array)
        except OSError:
            return []
        return [int(name) for name in names if name.isascii() and name.isdigit()]

    def task(self, index: int) -> JobFolder:
        """Return the folder of an array task."""
        return ArrayTaskFolder(os.path.join(self.array, str(index)))

    @property
    def is_cancelled(self) -> bool:
        """Whether this scheduler has cancelled the job or the array task."""
        return os.path.exists(self.cancel) or os.path.exists(self.whole.cancel)


class ArrayTaskFolder(JobFolder):
    """The paths below the folder of an array task. The app, the request and the script are the whole job's."""

    @property
    def whole(self) -> JobFolder:
        return JobFolder(os.path.dirname(os.path.dirname(self.root)))

    @property
    def app(self) -> str:
        return self.whole.app

    @property
    def request(self) -> str:
        return self.whole.request

    @property
    def script(self) -> str:
        return self.whole.script

    @property
    def job_log(self) -> str:
        return f"{self.root}.log"


def run_folder(whole: JobFolder, request: Mapping[str, Any], environ: Mapping[str, str]) -> JobFolder:
    """Return the folder of the run that this process belongs to: the array task's, or the job's if it is no array."""
    return whole.task(int(environ["SLURM_ARRAY_TASK_ID"])) if request["sbatch"].get("array") else whole


def jobs_dir() -> str:
    """Return the default parent of jobs' folders."""
    return os.path.join(state_files.state_dir(), "slurm", "jobs")


def ids_dir() -> str:
    """Return the folder of the links from job ids to jobs' folders."""
    return os.path.join(state_files.state_dir(), "slurm", "ids")


def new(name: str, job_dir: str | None) -> str:
    """Choose a path for the folder of a new job.

    Args:
        name: the app's name.
        job_dir: the parent folder; None or empty for ``jobs_dir()``.
    """
    safe = re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:60].lstrip("-.") or "app"
    return os.path.join(os.path.abspath(job_dir) if job_dir else jobs_dir(), f"{safe}-{os.urandom(5).hex()}")


def link_id(app_id: str, folder: str) -> None:
    """Link a job's id to its folder."""
    os.makedirs(ids_dir(), mode=0o700, exist_ok=True)
    aside = os.path.join(ids_dir(), f".{app_id}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(aside)
    os.symlink(folder, aside)
    os.rename(aside, os.path.join(ids_dir(), app_id))


def delete(app_id: str, folder: JobFolder) -> None:
    """Remove a job's folder and leave a dangling link, which marks it as deleted while Slurm remembers the job."""
    link_id(app_id, folder.root)
    remove(folder.root)


def remove(root: str) -> None:
    """Remove a job's folder. Other processes see the whole folder or none of it."""
    trash = f"{root}{TRASH}{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        os.rename(root, trash)
    remove_tree(trash)


def is_removed(app_id: str, folder: JobFolder) -> bool:
    """Whether the folder to which this state directory links a job's id does not exist any more."""
    try:
        return os.readlink(os.path.join(ids_dir(), app_id)) == folder.root and not os.path.isdir(folder.root)
    except OSError:
        return False


def known() -> dict[str, JobFolder]:
    """Return the folders of the jobs submitted with this state directory, by job id, without deleted ones."""
    try:
        names = os.listdir(ids_dir())
    except FileNotFoundError:
        return {}
    found = {name: find(name) for name in names if name.isascii() and name.isdigit()}
    return {name: folder for name, folder in found.items() if folder is not None}


def find(app_id: str) -> JobFolder | None:
    """Return the folder of a job that was submitted with this state directory; None if there is no such folder."""
    try:
        folder = JobFolder(os.readlink(os.path.join(ids_dir(), app_id)))
    except OSError:
        return None
    return folder if os.path.isdir(folder.root) else None


def noted(comment: str) -> JobFolder | None:
    """Return the folder that a job's comment names; None if another program submitted the job."""
    _, mark, path = comment.partition(MARK)
    return JobFolder(path.strip()) if mark and path.strip() else None


def note(folder: str, comment: str | None) -> str:
    """Return a job's comment: the user's, if any, followed by MARK and the folder."""
    return f"{comment} {MARK}{folder}" if comment else f"{MARK}{folder}"


def read_request(paths: JobFolder, node: str) -> dict[str, Any]:
    """Read request.json; exit the process with a message if this node cannot read it."""
    data = state_files.read_json(paths.request)
    if data is None:
        sys.exit(f"node {node} cannot read {paths.request}: all nodes must see that folder (run option job_dir)")
    return data
