# SPDX-License-Identifier: BSD-3-Clause
"""What a supervisor runs: the content of request.json, which ``torchx run --dryrun`` shows for monarch_local.

Environments hold the role's own variables only. The supervisor inherits the submitter's environment and adds these to
it, so that secrets in the user's shell (tokens, passwords) are not written to disk.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from string import Template
from typing import TYPE_CHECKING

from torchx_monarch.backends.core import state_files
from torchx_monarch.model.env_names import RANK0_HOST
from torchx_monarch.model.role_spec import RoleSpec

if TYPE_CHECKING:
    from torchx.specs import Role


@dataclass
class RoleRequest:
    """One role to run.

    Attributes:
        spec: how many replicas it has, and how it ends and restarts.
        command: program and arguments, with TorchX's macros. The program is looked up on the PATH of the replica's
            environment, then in ``cwd``.
        env: variables over those of the supervisor, with macros as well.
        cwd: the working directory.
        image: the value of the macro ``img_root``.
        first: the id of its first replica; earlier ones run elsewhere.
    """

    spec: RoleSpec
    command: list[str]
    env: dict[str, str]
    cwd: str
    image: str = ""
    first: int = 0

    @classmethod
    def of(cls, role: Role, spec: RoleSpec, image: str | None = None) -> RoleRequest:
        """Return the request of a role, which runs in its image if that is a folder, as TorchX does.

        Args:
            image: as the attribute; None for the working directory.
        """
        cwd = os.path.abspath(role.image) if role.image and os.path.isdir(role.image) else os.getcwd()
        return cls(spec, [role.entrypoint, *role.args], dict(role.env), cwd, cwd if image is None else image)

    @property
    def name(self) -> str:
        """The name of the role."""
        return self.spec.name

    def filled(self, app_id: str, replica: int) -> tuple[list[str], dict[str, str]]:
        """Return command and environment of a replica: macros are replaced as by ``torchx.specs.macros.Values``."""
        values = {"img_root": self.image, "app_id": app_id, "replica_id": str(replica), "rank0_env": RANK0_HOST}

        def fill(text: str) -> str:
            return Template(text).safe_substitute(values)

        # TorchX does not replace macros in the entrypoint.
        env = {name: fill(value) for name, value in self.env.items()}
        return [self.command[0], *map(fill, self.command[1:])], env


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
