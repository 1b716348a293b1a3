# SPDX-License-Identifier: BSD-3-Clause
"""The JSON files of a job's folder as data classes, with their types checked when they are read.

Files may be damaged, edited, planted, or written by another version. A file is valid as a whole or not at all: ``read``
returns None for an invalid file as for a missing one. Standard library only, because the batch step imports this.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.slurm.folder import JobFolder
from torchx_monarch.model.codec import Seconds
from torchx_monarch.model.state import State
from torchx_monarch.supervisor.records import ReplicaRecord
from torchx_monarch.system import error_files

T = TypeVar("T")

_LARGEST_CODE = 1 << 31


@dataclass(frozen=True)
class Submission:
    """The part of request.json (``SlurmRequest``) that is read after submission.

    Attributes:
        grace: seconds from SIGTERM to SIGKILL when replicas are stopped.
    """

    grace: float = 0.0


@dataclass
class BatchRecord:
    """The content of job.json: the batch step's record of its run.

    Attributes:
        job_id: id of the job.
        started: when the first run of the job began, in seconds since the epoch.
        state: its final state; RUNNING until it has ended.
        msg: the reason, for the user; may be empty.
        nodes: node list of each role.
        restarts: how often the job or a role was restarted.
        retries: how many of these restarts counted as retries of the app.
        role_restarts: the value of ``restarts`` at each role's latest start, by role name.
        outside: whether Slurm ended the run; Slurm may restart it.
        requeues: how often Slurm had restarted the job when the run began.
        ended: when the run ended, in seconds since the epoch; None until then.
    """

    job_id: str = ""
    started: Seconds = 0.0
    state: State = State.RUNNING
    msg: str = ""
    nodes: list[str] = field(default_factory=list)
    restarts: int = 0
    retries: int = 0
    role_restarts: dict[str, int] = field(default_factory=dict)
    outside: bool = False
    requeues: int = 0
    ended: Seconds | None = None


@dataclass(frozen=True)
class CancelRecord:
    """The content of cancel.json.

    Attributes:
        time: when the app was first cancelled, in seconds since the epoch.
    """

    time: Seconds


@dataclass
class TaskRecord(ReplicaRecord):
    """The content of replica.json: the latest start of one replica.

    ``restarts`` includes restarts of the job and its role.

    Attributes:
        job_restart: the batch step's number of restarts when the replica's task began.
        hostname: the name of its node; may be empty.
    """

    job_restart: int = 0
    hostname: str = ""

    def __post_init__(self) -> None:
        if self.exit_code is not None and abs(self.exit_code) >= _LARGEST_CODE:
            raise ValueError("exit_code is out of range")


def read(cls: type[T], path: str, below: str) -> T | None:
    """Read a file; return None if it is missing or damaged.

    Args:
        path: the file.
        below: ``JobFolder.trusted``.
    """
    with contextlib.suppress(state_files.DamagedFileError):  # NFS may not find a file that is just being replaced
        return state_files.load(cls, path, below)
    return None


def read_submission(folder: JobFolder) -> Submission:
    """Read what a job's folder says of its submission: nothing if request.json is missing or damaged."""
    return read(Submission, folder.request, folder.trusted) or Submission()


def read_task(folder: JobFolder, role: str, replica: int) -> TaskRecord | None:
    """Read the record of a replica; keep the known fields of its error only (``error_files.cleaned``)."""
    found = read(TaskRecord, folder.record(role, replica), folder.trusted)
    return found and replace(found, error=error_files.cleaned(found.error or "") or None)
