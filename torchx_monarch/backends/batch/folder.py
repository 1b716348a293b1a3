# SPDX-License-Identifier: BSD-3-Clause
"""The folder of an app, which the submitting machine and all nodes see, and the JSON files in it.

``app.json`` is the submitted app with the ids of its jobs, ``request.json`` what its tasks read, ``cancel.json`` the
request to stop it, ``job.log`` what the batch system and the tasks have to say, ``events.jsonl`` its events, and
``logs/ROLE/K/`` has the logs, the error file and the record (``replica.json``) of each replica. Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.local.supervision import RoleRequest, SupervisorRecord
from torchx_monarch.model.env_names import CREDENTIALS
from torchx_monarch.model.role_spec import RoleSpec

R = TypeVar("R", bound="BatchRequest")


@dataclass
class BatchRequest:
    """One app to run: what a dry run shows, and, without the commands, what the tasks read.

    Attributes:
        name: name of the app.
        folder: absolute path of its folder, which does not exist yet.
        roles: its roles.
        commands: the commands that submit its jobs.
        grace: seconds from SIGTERM to SIGKILL when its replicas are stopped.
    """

    name: str
    folder: str
    roles: list[RoleRequest]
    commands: list[list[str]]
    grace: float = 30.0

    def with_credentials(self: R, credentials: str) -> R:
        """Return the same request with the job's credentials in the environment of all hosts."""
        given = {CREDENTIALS: credentials}
        roles = [replace(role, env={**role.env, **given}) if role.spec.runs_hosts else role for role in self.roles]
        return replace(self, roles=roles)


class JobFolder(state_files.AppPaths):
    """The folder of an app, below which everything belongs to the caller."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.trusted = root
        self.job_log = os.path.join(root, "job.log")
        self.status = os.path.join(root, "job.json")

    def load_record(self) -> SupervisorRecord | None:
        """Read the record of Slurm's batch step; return None if it is missing, or just being replaced."""
        return state_files.load_undamaged(SupervisorRecord, self.status, self.trusted)

    def load_jobs(self) -> list[str]:
        """Read the ids of the app's jobs, as far as they are submitted."""
        content = state_files.load_undamaged(dict[str, Any], self.app, self.trusted) or {}
        return list(content.get("jobs", ()))

    def replica(self, role: str, replica: int) -> ReplicaFolder:
        return ReplicaFolder(self, role, replica)

    def records(self, spec: RoleSpec) -> list[SupervisorRecord | None]:
        """Return the records of the replicas of a role, by replica (``ReplicaFolder.load_record``)."""
        return [self.replica(spec.name, k).load_record() for k in range(spec.replicas)]

    def clear(self, roles: Sequence[RoleRequest]) -> None:
        """Write files without content that others look for again and again.

        NFS tells about a new content at once, when a file is opened, but about a new file after up to a minute.
        """
        state_files.write_json(self.cancel, {})
        for role in roles:
            paths = self.replica(role.spec.name, 0)
            os.makedirs(paths.root, mode=0o700, exist_ok=True)
            state_files.write_json(paths.status, {})


class ReplicaFolder(state_files.SupervisorPaths):
    """The folder of one replica: its logs and its record. The request, and that to stop, are those of the app.

    Attributes:
        job: the folder of its app.
        events: the app's events for a replica 0, else a file of its own: network file systems do not order appends.
    """

    def __init__(self, job: JobFolder, role: str, replica: int) -> None:
        super().__init__(job.replica_logs(role, replica), job.root)
        self.job, self.request, self.cancel = job, job.request, job.cancel
        self.status = os.path.join(self.root, "replica.json")
        if replica == 0:
            self.events = job.events

    def replica_logs(self, role: str, replica: int) -> str:
        return self.root

    def load_record(self) -> SupervisorRecord | None:
        """Read the record of the replica; return None if its task has written none, or is just replacing it (NFS)."""
        return state_files.load_undamaged(SupervisorRecord, self.status, self.trusted)
