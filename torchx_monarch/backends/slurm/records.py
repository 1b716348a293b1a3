# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Read the JSON files of a job's folder, each into a data class whose fields have the types that they state.

Files may be damaged, edited, planted, or of another version. One that does not hold what was written to it is never
half read: ``read`` gives None for it, as for one that is not there. Standard library only: the batch step imports this.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeVar

from torchx_monarch.backends.local import state_files
from torchx_monarch.backends.local.status import STATES, TERMINAL
from torchx_monarch.backends.slurm import array
from torchx_monarch.system import error_files

T = TypeVar("T")

_LARGEST_CODE = 1 << 31


@dataclass(frozen=True)
class Submission:
    """The part of request.json (``SlurmRequest``) that is of use once the job is submitted.

    Attributes:
        sbatch: options of the job as a whole.
        grace: seconds from SIGTERM to SIGKILL when replicas are stopped.
    """

    sbatch: dict[str, str | None] = field(default_factory=dict)
    grace: float = 0.0

    @property
    def tasks(self) -> list[int]:
        """The indices of the array tasks; empty where the job is no array."""
        return array.tasks(self.sbatch.get("array"))


@dataclass(frozen=True)
class BatchRecord:
    """The content of job.json: what the batch step knows of its run.

    Attributes:
        state: how the run has ended, as named in torchx.specs.AppState; empty until it has.
        msg: why, for a person.
        role: name of the role that decided the end; None where none did.
        nodes: node list of each role.
        restarts: how often the job or a role was started again.
        retries: how many of these have used up a retry of the app.
        role_restarts: for each role the number of restarts at its latest start.
        outside: whether Slurm ended the run, which it may then start again.
        ended: seconds since the epoch; None until it has.
    """

    state: str = ""
    msg: str = ""
    role: str | None = None
    nodes: list[str] = field(default_factory=list)
    restarts: int = 0
    retries: int = 0
    role_restarts: dict[str, int] = field(default_factory=dict)
    outside: bool = False
    ended: float | None = None

    def __post_init__(self) -> None:
        if self.state:
            _check_state(self.state, TERMINAL)


@dataclass(frozen=True)
class RunEnd:
    """How a job or an array task has ended.

    Attributes:
        state: its name in torchx.specs.AppState.
        msg: why, for a person.
        nodes: node list of each role.
    """

    state: str
    msg: str = ""
    nodes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        _check_state(self.state, TERMINAL)


@dataclass(frozen=True)
class EndRecord(RunEnd):
    """The content of end.json.

    Attributes:
        tasks: of an array the end of each task that has never run, by index.
    """

    tasks: dict[str, RunEnd] = field(default_factory=dict)


@dataclass(frozen=True)
class CancelRecord:
    """The content of cancel.json.

    Attributes:
        time: when the end was first asked for, in seconds since the epoch.
    """

    time: float


@dataclass(frozen=True)
class ReplicaRecord:
    """The content of replica.json: one replica in its latest start.

    Attributes:
        state: its name in torchx.specs.AppState.
        exit_code: -N for signal N; None while it runs.
        restarts: how often it was started again, with the job's own restarts.
        job_restart: the number of restarts of its role when its task began.
        error: the content of its error file as JSON text; None without one.
        started, ended: seconds since the epoch.
        hostname: its node.
    """

    state: str
    exit_code: int | None = None
    restarts: int = 0
    job_restart: int = 0
    error: str | None = None
    started: float | None = None
    ended: float | None = None
    hostname: str = ""

    def __post_init__(self) -> None:
        _check_state(self.state, STATES)
        if self.exit_code is not None and abs(self.exit_code) >= _LARGEST_CODE:
            raise ValueError("exit_code is out of range")


def read(cls: type[T], path: str) -> T | None:
    """Read a file; None when it is not there or damaged.

    Args:
        cls: what it holds.
        path: the file.
    """
    return checked(cls, path)[0]


def checked(cls: type[T], path: str) -> tuple[T | None, str]:
    """Read a file, and say what is wrong with it; empty where it is sound or not there."""
    try:
        return state_files.load(cls, path), ""
    except state_files.DamagedFileError as error:
        return None, str(error)


def read_replica(path: str) -> ReplicaRecord | None:
    """Read the record of a replica, of its error those fields that somebody reads (``error_files.cleaned``)."""
    found = read(ReplicaRecord, path)
    return found and replace(found, error=error_files.cleaned(found.error or "") or None)


def _check_state(state: str, allowed: frozenset[str]) -> None:
    """Refuse what is no state.

    Raises:
        ValueError: it is not one of those allowed.
    """
    if state not in allowed:
        raise ValueError(f"state is {state[:40]!r}, not one of {', '.join(sorted(allowed))}")
