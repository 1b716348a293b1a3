# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Read the JSON files of a job's folder into data classes, and check the types of their fields.

Files may be damaged, edited, planted, or written by another version. A file is valid as a whole or not at all: ``read``
returns None for an invalid file as for a missing one. Standard library only, because the batch step imports this.
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
    """The part of request.json (``SlurmRequest``) that is read after submission.

    Attributes:
        sbatch: sbatch options of the whole job, by name without dashes; None for an option without a value.
        grace: seconds from SIGTERM to SIGKILL when replicas are stopped.
    """

    sbatch: dict[str, str | None] = field(default_factory=dict)
    grace: float = 0.0

    @property
    def tasks(self) -> list[int]:
        """The indices of the array tasks; empty if the job is no array."""
        return array.tasks(self.sbatch.get("array"))


@dataclass(frozen=True)
class BatchRecord:
    """The content of job.json: the batch step's record of its run.

    Attributes:
        state: final state, a name of torchx.specs.AppState; empty until the run has ended.
        msg: the reason, for the user; may be empty.
        role: name of the role that decided the result; None if no role has.
        nodes: node list of each role.
        restarts: how often the job or a role was restarted.
        retries: how many of these restarts counted as retries of the app.
        role_restarts: the value of ``restarts`` at each role's latest start, by role name.
        outside: whether Slurm ended the run; Slurm may restart it.
        ended: when the run ended, in seconds since the epoch; None until then.
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
    """The final state of a job or an array task.

    Attributes:
        state: a name of torchx.specs.AppState.
        msg: the reason, for the user; may be empty.
        nodes: node list of each role; empty if not known.
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
        tasks: for an array, the final state of each task that never ran, by index; empty otherwise.
    """

    tasks: dict[str, RunEnd] = field(default_factory=dict)


@dataclass(frozen=True)
class CancelRecord:
    """The content of cancel.json.

    Attributes:
        time: when the app was first cancelled, in seconds since the epoch.
    """

    time: float


@dataclass(frozen=True)
class SlurmReplica:
    """The content of replica.json: the latest start of one replica.

    Attributes:
        state: a name of torchx.specs.AppState.
        exit_code: -N for signal N; None while it runs.
        restarts: how often the replica was restarted, including restarts of the job and its role.
        job_restart: the batch step's number of restarts when the replica's task began.
        error: the content of its error file as JSON text; None without one.
        started: when this start began, in seconds since the epoch; None if it has not.
        ended: when it ended, in seconds since the epoch; None while it runs.
        hostname: the name of its node; may be empty.
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
    """Read a file; return None if it is missing or damaged.

    Args:
        cls: the data class of its content.
        path: the file.
    """
    return checked(cls, path)[0]


def checked(cls: type[T], path: str) -> tuple[T | None, str]:
    """Read a file; return also what is wrong with it, which is empty if the file is sound or missing."""
    try:
        return state_files.load(cls, path), ""
    except state_files.DamagedFileError as error:
        return None, str(error)


def read_replica(path: str) -> SlurmReplica | None:
    """Read the record of a replica; keep the known fields of its error only (``error_files.cleaned``)."""
    found = read(SlurmReplica, path)
    return found and replace(found, error=error_files.cleaned(found.error or "") or None)


def _check_state(state: str, allowed: frozenset[str]) -> None:
    """Validate the name of a state.

    Raises:
        ValueError: ``state`` is not in ``allowed``.
    """
    if state not in allowed:
        raise ValueError(f"state is {state[:40]!r}, not one of {', '.join(sorted(allowed))}")
