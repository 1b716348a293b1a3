# SPDX-License-Identifier: BSD-3-Clause
"""What a supervisor runs: the content of request.json, which ``torchx run --dryrun`` shows for monarch_local.

Environments hold the role's own variables only. The supervisor inherits the submitter's environment and adds these to
it, so that secrets in the user's shell (tokens, passwords) are not written to disk.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchx_monarch.backends.core import state_files
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.supervisor.replica import ReplicaRequest


@dataclass
class RoleRequest:
    """One role to run: its processes, by replica id, of which ``first`` is the first id; others run elsewhere."""

    spec: RoleSpec
    replicas: list[ReplicaRequest]
    first: int = 0

    @property
    def name(self) -> str:
        """The name of the role."""
        return self.spec.name


@dataclass
class SupervisorRequest:
    """One app to run, or one replica of an app of several machines, which ssh or a batch system runs.

    Attributes:
        grace: seconds from SIGTERM to SIGKILL when the app is stopped.
        run_dir: the folder for sockets; "" until the app is submitted.
        job: the app's marker, ``<app id>:<random>``, which all of its processes have in their environment as
            MONARCH_JOB; "" until the app is submitted.
        gpus, slots: how many of this machine's it waits for (``machine_queue``).
        job_id: the app's id for users, where ``app_id`` is that of the folder of one replica; empty if it is the same.
        queued: when it was submitted, in seconds since the epoch, for its place in the queue; 0 for when it came here.
        networked: whether its hosts meet those of other machines, by addresses in the environments of the replicas.
    """

    app_id: str
    name: str
    roles: list[RoleRequest]
    grace: float = 30.0
    run_dir: str = ""
    job: str = ""
    networked: bool = False
    gpus: int = 0
    slots: int = 0
    queued: float = 0.0
    job_id: str = ""

    @classmethod
    def load(cls, paths: state_files.AppPaths) -> SupervisorRequest | None:
        """Read the request of an app as submitted; return None if the app does not exist."""
        return state_files.load(cls, paths.request, paths.trusted)
