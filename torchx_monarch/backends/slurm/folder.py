# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The folder of a job, and how it is found again by the job's id, from any process and directory.

Below the state directory (see ``backends.local.state_files``)::

    slurm/jobs/NAME-RANDOM/   the folder, unless the run option job_dir puts it elsewhere
    slurm/ids/JOBID           a link to it

In the folder: ``app.json`` as submitted, ``request.json``, ``job.sh``, ``job.log`` (what the batch step, srun and Slurm
print), ``job.json`` (what the batch step knows), ``end.json`` (how Slurm says it has ended), ``cancel.json`` (the wish
to end it), ``events.jsonl``, and ``logs/ROLE/K/`` with the logs, the error file and the record of each replica. Of a
job array each task has ``array/INDEX/`` with all of these that are a run's own, and its ``job.log`` beside it as
``array/INDEX.log``.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from torchx_monarch.backends.local import state_files
from torchx_monarch.backends.local.folder import remove_tree

MARK = "torchx-monarch:"
"""Begins the note in a job's comment that says where its folder is, and that the job is ours."""


TRASH = ".trash-"
"""In the name of a folder that is being removed."""


class JobFolder(state_files.AppPaths):
    """Every path below a job's folder."""

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

    @property
    def whole(self) -> JobFolder:
        """Of the job: this one, unless it is that of an array task."""
        return self

    @property
    def array(self) -> str:
        """Where the folders of array tasks are."""
        return os.path.join(self.root, "array")

    def begun_tasks(self) -> list[int]:
        """The indices of the array tasks that have a folder, in no order; empty where the job is no array."""
        try:
            names = os.listdir(self.array)
        except OSError:
            return []
        return [int(name) for name in names if name.isascii() and name.isdigit()]

    def task(self, index: int) -> JobFolder:
        """The folder of an array task."""
        return ArrayTaskFolder(os.path.join(self.array, str(index)))

    @property
    def is_cancelled(self) -> bool:
        """Whether its end was asked for through us."""
        return os.path.exists(self.cancel) or os.path.exists(self.whole.cancel)


class ArrayTaskFolder(JobFolder):
    """Every path below the folder of an array task. What was submitted is the whole job's."""

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


def of_this_run(paths: JobFolder, request: Mapping[str, Any], environ: Mapping[str, str]) -> JobFolder:
    """The folder of the run that this process is part of: the job's, or that of its array task.

    Args:
        paths: the job's.
        request: what is in it, as read.
        environ: of this process.
    """
    return paths.task(int(environ["SLURM_ARRAY_TASK_ID"])) if request["sbatch"].get("array") else paths


def jobs_dir() -> str:
    """Where folders are made by default."""
    return os.path.join(state_files.state_dir(), "slurm", "jobs")


def ids_dir() -> str:
    """Where the links to them are."""
    return os.path.join(state_files.state_dir(), "slurm", "ids")


def new(name: str, job_dir: str | None) -> str:
    """A path for the folder of a new job."""
    safe = re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:60].lstrip("-.") or "app"
    return os.path.join(os.path.abspath(job_dir) if job_dir else jobs_dir(), f"{safe}-{os.urandom(5).hex()}")


def remember(app_id: str, folder: str) -> None:
    """Link a job's id to its folder."""
    os.makedirs(ids_dir(), mode=0o700, exist_ok=True)
    aside = os.path.join(ids_dir(), f".{app_id}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(aside)
    os.symlink(folder, aside)
    os.rename(aside, os.path.join(ids_dir(), app_id))


def delete(app_id: str, folder: JobFolder) -> None:
    """Remove a job's folder. A link to nothing is left: Slurm remembers the job for a while."""
    remember(app_id, folder.root)
    remove(folder.root)


def remove(root: str) -> None:
    """Remove a job's folder; others see all of it or nothing."""
    trash = f"{root}{TRASH}{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        os.rename(root, trash)
    remove_tree(trash)


def is_deleted(app_id: str, folder: JobFolder) -> bool:
    """Whether a job that Slurm still remembers was deleted through this state directory."""
    try:
        return os.readlink(os.path.join(ids_dir(), app_id)) == folder.root and not os.path.isdir(folder.root)
    except OSError:
        return False


def known() -> dict[str, JobFolder]:
    """The jobs submitted with this state directory, by id, without those that were deleted."""
    try:
        names = os.listdir(ids_dir())
    except FileNotFoundError:
        return {}
    found = {name: find(name) for name in names if name.isascii() and name.isdigit()}
    return {name: folder for name, folder in found.items() if folder is not None}


def find(app_id: str) -> JobFolder | None:
    """The folder of a job that was submitted with this state directory."""
    try:
        folder = JobFolder(os.readlink(os.path.join(ids_dir(), app_id)))
    except OSError:
        return None
    return folder if os.path.isdir(folder.root) else None


def noted(comment: str) -> JobFolder | None:
    """The folder that a job's comment names; None when the job is not ours."""
    _, mark, path = comment.partition(MARK)
    return JobFolder(path.strip()) if mark and path.strip() else None


def note(folder: str, comment: str | None) -> str:
    """A job's comment: the user's and ours."""
    return f"{comment} {MARK}{folder}" if comment else f"{MARK}{folder}"


def read_request(paths: JobFolder, node: str) -> dict[str, Any]:
    """What is to be run; ends the process, with a word, on a node that does not see the folder."""
    data = state_files.read_json(paths.request)
    if data is None:
        sys.exit(f"node {node} cannot read {paths.request}: all nodes must see that folder (run option job_dir)")
    return data
