# SPDX-License-Identifier: BSD-3-Clause
"""The folder of an app, which the submitting machine and all nodes see, and the JSON files in it.

``app.json`` is the submitted app with the ids of its jobs, ``request.json`` what its tasks read, ``cancel.json`` the
request to stop it, ``job.log`` what the batch system and the tasks have to say, ``events.jsonl`` its events, and
``logs/ROLE/K/`` has the logs, the error file and the record (``replica.json``) of each replica. Standard library only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.snapshot import Outcome
from torchx_monarch.backends.local.status import AppRecord
from torchx_monarch.model.codec import Seconds
from torchx_monarch.model.env_names import CREDENTIALS
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.model.state import State

R = TypeVar("R", bound="BatchRequest")


@dataclass
class BatchRole:
    """One role.

    Attributes:
        spec: how it ends and restarts.
        command: program and arguments, with TorchX's macros, which each task replaces.
        env: variables over those of the job, with macros as well.
        cwd: the working directory.
        image: the value of the macro ``img_root``.
        cpu: number of CPUs that a replica needs; 0 if it does not say.
        gpu: number of GPUs that a replica needs.
        memory: megabytes of memory that a replica needs; 0 if it does not say.
    """

    spec: RoleSpec
    command: list[str]
    env: dict[str, str]
    cwd: str
    image: str = ""
    cpu: int = 0
    gpu: int = 0
    memory: int = 0


@dataclass
class BatchRequest:
    """One app to run: what a dry run shows, and, without the commands, what the tasks read.

    Attributes:
        name: name of the app.
        folder: absolute path of its folder, which does not exist yet.
        roles: its roles.
        commands: the commands that submit its jobs.
        grace: seconds from SIGTERM to SIGKILL when its replicas are stopped.
        lease: seconds for which a host may be stopped (SIGSTOP) until it counts as lost.
    """

    name: str
    folder: str
    roles: list[BatchRole]
    commands: list[list[str]]
    grace: float = 30.0
    lease: float = 30.0

    def moved(self: R, folder: str) -> R:
        """Return the same request with another folder, whose path occurs in its commands."""
        commands = [[word.replace(self.folder, folder) for word in command] for command in self.commands]
        return replace(self, folder=folder, commands=commands)

    def with_credentials(self: R, credentials: str) -> R:
        """Return the same request with the job's credentials in the environment of all hosts."""
        given = {CREDENTIALS: credentials}
        roles = [replace(role, env={**role.env, **given}) if role.spec.runs_hosts else role for role in self.roles]
        return replace(self, roles=roles)


@dataclass
class StopRequest:
    """The content of cancel.json: why and how an app is to end.

    Attributes:
        state: its final state; PENDING if it goes back into the queue.
        message: the reason, for users.
        time: when it was first asked to stop, in seconds since the epoch.
        grace: seconds from SIGTERM to SIGKILL; None for the run option.
    """

    state: State
    message: str
    time: Seconds
    grace: float | None = None

    @property
    def outcome(self) -> Outcome | None:
        """How the app ends; None if it goes back into the queue."""
        return Outcome(self.state, self.message, time=self.time) if self.state.is_terminal else None


@dataclass
class TaskRecord(AppRecord):
    """The record of a task, in which the supervisor's loop keeps its one replica.

    Attributes:
        hostname: the name by which the other replicas reach it; empty once the batch system has taken its node away.
    """

    hostname: str = ""


class JobFolder(state_files.AppPaths):
    """The folder of an app."""

    @property
    def trusted(self) -> str:
        """The folder below which everything belongs to the caller and is no symbolic link (``safe_files``)."""
        return self.root

    @property
    def job_log(self) -> str:
        return os.path.join(self.root, "job.log")

    def replica(self, role: str, replica: int) -> ReplicaFolder:
        """Return the folder of one replica."""
        return ReplicaFolder(self.replica_logs(role, replica))

    def load_stop(self) -> StopRequest | None:
        """Read the request to stop the app; return None if there is none."""
        return state_files.load_undamaged(StopRequest, self.cancel, self.trusted)

    def load_ending(self) -> Outcome | None:
        """Read how the app was asked to end; return None if it was not, or goes back into the queue."""
        stop = self.load_stop()
        return stop.outcome if stop else None

    def clear(self, roles: Sequence[BatchRole]) -> None:
        """Write files without content that others look for again and again.

        NFS tells about a new content at once, when a file is opened, but about a new file after up to a minute.
        """
        state_files.write_json(self.cancel, {})
        for role in roles:
            paths = self.replica(role.spec.name, 0)
            os.makedirs(paths.root, mode=0o700, exist_ok=True)
            state_files.write_json(paths.status, {})

    def request_stop(self, outcome: Outcome, grace: float | None, default: float) -> None:
        """Ask the tasks of the app to stop. The first outcome counts, and the shortest grace period.

        Args:
            grace: seconds from SIGTERM to SIGKILL; None for the run option.
            default: the run option.
        """
        asked = self.load_stop()
        if asked is None or not asked.state.is_terminal:
            asked = StopRequest(outcome.state, outcome.message, outcome.time or time.time(), grace)
        elif grace is not None and grace < (default if asked.grace is None else asked.grace):
            asked = replace(asked, grace=grace)
        else:
            return
        state_files.write_json(self.cancel, asdict(asked), below=self.trusted)


class ReplicaFolder(state_files.AppPaths):
    """The folder of one replica, with the paths that the supervisor's loop uses: some are those of the whole app."""

    @property
    def job(self) -> JobFolder:
        """The folder of its app."""
        return JobFolder(os.path.dirname(os.path.dirname(os.path.dirname(self.root))))

    @property
    def trusted(self) -> str:
        return self.job.root

    @property
    def request(self) -> str:
        return self.job.request

    @property
    def status(self) -> str:
        return os.path.join(self.root, "replica.json")

    @property
    def events(self) -> str:
        """The app's events for a replica 0, else a file of its own: network file systems do not order appends."""
        return self.job.events if os.path.basename(self.root) == "0" else os.path.join(self.root, "events.jsonl")

    def replica_logs(self, role: str, replica: int) -> str:
        return self.root

    def load_record(self) -> TaskRecord | None:
        """Read the record of the replica; return None if its task has written none, or is just replacing it (NFS)."""
        return state_files.load_undamaged(TaskRecord, self.status, self.trusted)
