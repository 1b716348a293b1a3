# SPDX-License-Identifier: BSD-3-Clause
"""The folder of a job, and how any process finds it by the job's id.

Below the state directory (see ``core.state_files``)::

    slurm/jobs/NAME-RANDOM/   the folder, unless the run option job_dir puts it elsewhere
    slurm/ids/JOBID           a symbolic link to it

The folder holds ``app.json`` (the submitted app), ``request.json``, ``job.sh``, ``job.log`` (output of the batch step,
srun and Slurm), ``job.json`` (the batch step's record), ``cancel.json`` (the time of the first cancel),
``events.jsonl``, ``reserve`` (disk space for the last job.json, while the batch step runs), ``logs/ROLE/K/`` with the
logs, the error file and the record of each replica, and ``taskINDEX.sh`` of each role that runs in containers.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import Any

from torchx_monarch.backends.core import state_files
from torchx_monarch.system import safe_files
from torchx_monarch.system.run_dirs import remove_tree

MARK = "torchx-monarch:"
"""Precedes the path of the folder in a job's comment, and marks the job as this scheduler's."""

TRASH = ".trash-"
"""Part of the name of a folder that is being removed."""

_NAME = re.compile(r".+-[0-9a-f]{10}")
"""The name of a job's folder, as ``new`` chooses it."""


class JobFolder(state_files.AppPaths):
    """The paths below a job's folder."""

    @property
    def trusted(self) -> str:
        """The folder below which everything belongs to the caller and is no symbolic link (``safe_files``)."""
        return self.root

    @property
    def script(self) -> str:
        return os.path.join(self.root, "job.sh")

    @property
    def job_log(self) -> str:
        return os.path.join(self.root, "job.log")

    @property
    def job(self) -> str:
        return os.path.join(self.root, "job.json")

    def record(self, role: str, replica: int) -> str:
        return os.path.join(self.replica_logs(role, replica), "replica.json")

    def error_file(self, role: str, replica: int) -> str:
        return os.path.join(self.replica_logs(role, replica), "error.json")

    def task_script(self, role: int) -> str:
        """The command of the step of the role of this index, if it runs in containers."""
        return os.path.join(self.root, f"task{role}.sh")

    @property
    def submitted(self) -> float:
        """When the app was submitted, in seconds since the epoch; 0 if app.json cannot be seen."""
        try:
            return os.stat(self.app).st_mtime
        except OSError:
            return 0.0

    @property
    def is_cancelled(self) -> bool:
        """Whether this scheduler has cancelled the job."""
        return os.path.exists(self.cancel)


def jobs_dir() -> str:
    """Return the default parent of jobs' folders."""
    return os.path.join(state_files.state_dir(), "slurm", "jobs")


def ids_dir() -> str:
    """Return the folder of the links from job ids to jobs' folders."""
    return os.path.join(state_files.state_dir(), "slurm", "ids")


def new(name: str, job_dir: str | None) -> str:
    """Choose a path for the folder of a new job.

    Args:
        job_dir: the parent folder; None or empty for ``jobs_dir()``.
    """
    safe = re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:60].lstrip("-.") or "app"
    return os.path.join(os.path.abspath(job_dir) if job_dir else jobs_dir(), f"{safe}-{os.urandom(5).hex()}")


def prepare(folder: JobFolder) -> None:
    """Make the folders of the state directory that a submission writes to.

    Args:
        folder: the path of the job's folder, which is not made.

    Raises:
        StateDirError: one of them cannot be made, is a link, or belongs to another user.
    """
    from torchx_monarch.backends.core.errors import StateDirError  # needs TorchX, which the processes of jobs do not

    try:
        state_files.make_folder("slurm", "ids")
        if os.path.dirname(folder.root) == jobs_dir():
            state_files.make_folder("slurm", "jobs")
    except OSError as error:
        raise StateDirError(error.filename or ids_dir(), error.strerror or str(error)) from error


def link_id(app_id: str, folder: str) -> None:
    """Link a job's id to its folder.

    Raises:
        OSError: the link cannot be made, or the state directory must not be used (``state_files.make_folder``).
    """
    state_files.make_folder("slurm", "ids")
    aside = os.path.join(ids_dir(), f".{app_id}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(aside)
    os.symlink(folder, aside)
    os.rename(aside, os.path.join(ids_dir(), app_id))


def delete(app_id: str, folder: JobFolder) -> None:
    """Remove a job's folder and leave a dangling link, which marks it as deleted while Slurm remembers the job.

    Raises:
        safe_files.UnsafeFileError: the folder is not that of a job of this user.
        OSError: the folder cannot be removed, or the link cannot be made.
    """
    if os.path.lexists(folder.root):
        _check_job_folder(folder.root)
    link_id(app_id, folder.root)
    remove(folder.root)


def remove(root: str) -> None:
    """Remove a job's folder. Other processes see the whole folder or none of it."""
    trash = f"{root}{TRASH}{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        os.rename(root, trash)
    remove_tree(trash)


def is_removed(app_id: str, folder: JobFolder) -> bool:
    """Whether the folder to which this state directory links a job's id does not exist any more.

    Raises:
        StateAccessError: as for ``find``.
    """
    return _links(app_id).get(app_id) == folder.root and not os.path.isdir(folder.root)


def job_folders() -> dict[str, JobFolder]:
    """Return the folders of the jobs submitted with this state directory, by job id, without deleted ones.

    Raises:
        StateAccessError: as for ``find``.
    """
    found = {}
    for app_id, root in _links().items():
        try:
            if os.path.lexists(root):
                _check_job_folder(root)
                found[app_id] = JobFolder(root)
        except safe_files.UnsafeFileError as error:
            import logging  # called for errors alone: the tasks of a job import this module, and start without it

            log = logging.getLogger("torchx_monarch")
            log.warning("%s is not used: %s", os.path.join(ids_dir(), app_id), error)
    return found


def find(app_id: str) -> JobFolder | None:
    """Return the folder of a job that was submitted with this state directory; None if there is none that may be used.

    Raises:
        StateAccessError: another user owns the state directory, or it cannot be read.
    """
    root = _links(app_id).get(app_id)
    if root is None or not os.path.lexists(root):
        return None
    try:
        _check_job_folder(root)
    except safe_files.UnsafeFileError:
        return None
    return JobFolder(root)


def _links(app_id: str = "") -> dict[str, str]:
    """Return the folders to which ids of jobs are linked, as they were written, by id.

    Args:
        app_id: the only id to look for; empty for all.

    Raises:
        StateAccessError: as for ``find``.
    """
    found = {}
    try:
        fd = safe_files.open_folder(ids_dir(), below=state_files.state_dir())
        try:
            for name in [app_id] if app_id else os.listdir(fd):
                if name.isascii() and name.isdigit():
                    with contextlib.suppress(OSError):
                        found[name] = os.readlink(name, dir_fd=fd)
        finally:
            os.close(fd)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        from torchx_monarch.backends.core.errors import StateAccessError  # needs TorchX, which jobs do not

        raise StateAccessError.of(error, ids_dir()) from None
    return found


def _check_job_folder(root: str) -> None:
    """Check that a path is that of the folder of a job of this user.

    Raises:
        safe_files.UnsafeFileError: it is not.
    """
    if os.path.normpath(root) != root or not os.path.isabs(root) or not _NAME.fullmatch(os.path.basename(root)):
        raise safe_files.UnsafeFileError(root, "is not named as the folder of a job is")
    try:
        if os.path.dirname(root) == jobs_dir():
            os.close(safe_files.open_folder(root, below=state_files.state_dir()))
            return
        if os.path.islink(root):
            raise safe_files.UnsafeFileError(root, "is a symbolic link")
        # The run option job_dir may have named any folder, also one that belongs to another user.
        os.close(safe_files.open_file(JobFolder(root).script, below=root))
    except safe_files.UnsafeFileError:
        raise
    except OSError as error:
        raise safe_files.UnsafeFileError(root, f"is not the folder of a job of yours: {error.strerror}") from None


def folder_of_comment(comment: str) -> JobFolder | None:
    """Return the folder that a job's comment names; None if another program submitted the job."""
    _, mark, path = comment.partition(MARK)
    return JobFolder(path.strip()) if mark and path.strip() else None


def note(folder: str, comment: str | None) -> str:
    """Return a job's comment: the user's, if any, followed by MARK and the folder."""
    return f"{comment} {MARK}{folder}" if comment else f"{MARK}{folder}"


def read_request(paths: JobFolder, node: str) -> dict[str, Any]:
    """Read request.json; exit the process with a message if this node cannot read it."""
    data = state_files.read_json(paths.request, paths.trusted)
    if data is None:
        sys.exit(f"node {node} cannot read {paths.request}: all nodes must see that folder (run option job_dir)")
    return data
