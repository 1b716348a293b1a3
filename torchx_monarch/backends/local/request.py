# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the supervisor is asked to run: the content of request.json, and what ``torchx run --dryrun`` shows.

Environments hold the role's own variables only. The supervisor inherits the submitter's environment and adds these to
it: what is in the user's shell (tokens, passwords) is not written to disk.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from torchx_monarch.backends.local import state_files
from torchx_monarch.backends.outcome import RolePolicy


@dataclass
class ReplicaRequest:
    """One process to start.

    Attributes:
        args: the command; its first word is looked up on the PATH of the replica's environment, then in ``cwd``.
        env: set over the submitter's environment.
    """

    args: list[str]
    env: dict[str, str]
    cwd: str


@dataclass
class RoleRequest:
    """One role to run.

    Attributes:
        retry_policy: APPLICATION, ROLE or REPLICA.
        min_replicas: how many replicas it can do with, replica 0 among them; None for all.
        sidecar: whether it ends with the other roles.
    """

    name: str
    replicas: list[ReplicaRequest]
    max_retries: int = 0
    retry_policy: str = "APPLICATION"
    min_replicas: int | None = None
    sidecar: bool = False

    @property
    def policy(self) -> RolePolicy:
        """What decides how it and the app end."""
        return RolePolicy(len(self.replicas), self.min_replicas, self.sidecar)


@dataclass
class DetachedRequest:
    """One app to run.

    Attributes:
        grace: seconds from SIGTERM to SIGKILL when the app is stopped.
        run_dir: where sockets are made; "" until the app is submitted.
        job: ``<app id>:<random>``: every process of the app has it in its environment as MONARCH_JOB; "" until the app
            is submitted.
        lease: seconds for which a host may be stopped (SIGSTOP) until it counts as lost.
    """

    app_id: str
    name: str
    roles: list[RoleRequest]
    grace: float = 30.0
    run_dir: str = ""
    job: str = ""
    lease: float = 30.0

    def renamed(self, app_id: str) -> DetachedRequest:
        """The same request under another id.

        The id also stands in commands and environments (the macro ``${app_id}``). It ends in a random word, so it
        stands there for nothing else and can be replaced as text.
        """

        def new(text: str) -> str:
            return text.replace(self.app_id, app_id)

        def replica(old: ReplicaRequest) -> ReplicaRequest:
            return replace(old, args=[new(a) for a in old.args], env={k: new(v) for k, v in old.env.items()})

        roles = [replace(role, replicas=[replica(r) for r in role.replicas]) for role in self.roles]
        return replace(self, app_id=app_id, roles=roles)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def load(paths: state_files.AppPaths) -> DetachedRequest | None:
    """The request of an app as it was submitted; None when there is no such app.

    Raises:
        store.DamagedFileError: there is a file, and no request in it.
    """
    return state_files.load(DetachedRequest, paths.request, paths.trusted)
