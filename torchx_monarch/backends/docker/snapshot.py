# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Assemble the snapshot of an app from its existing containers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchx.specs import AppDef, AppState, ReplicaStatus, Role, RoleStatus

from torchx_monarch.backends import appdef_codec
from torchx_monarch.backends.docker import request, status
from torchx_monarch.backends.docker.final_states import FinalStates
from torchx_monarch.backends.docker.status import DockerReplica, DockerRole, DockerStatus
from torchx_monarch.backends.outcome import RolePolicy
from torchx_monarch.backends.protocols import CREDENTIALS

if TYPE_CHECKING:
    from docker.models.containers import Container

HOST_EXTRA = 10.0
"""Seconds that a container gets beyond the grace period, in which its host ends the ranks."""


@dataclass(frozen=True)
class DockerSnapshot:
    """The containers of an app and the state that follows from them.

    Attributes:
        app_id: the app's id.
        app: the submitted AppDef; without roles if the label that holds it is damaged.
        containers: the app's containers, sorted by role and replica.
        roles: the replicas that have a container, by role in the app's order; a role may have none.
        removed: the replicas, as ROLE/K, whose containers were removed.
        overall: the app's state.
        grace: seconds from SIGTERM to SIGKILL when the app is cancelled.
        created: when the first container was created, as dockerd writes times.
    """

    app_id: str
    app: AppDef
    containers: list[Container]
    roles: list[list[DockerReplica]]
    removed: list[str]
    overall: DockerStatus
    grace: float
    created: str

    @property
    def replicas(self) -> list[DockerReplica]:
        """All replicas, in the order of ``containers``."""
        return [replica for role in self.roles for replica in role]

    @property
    def sizes(self) -> dict[str, int]:
        """The number of replicas of each role, by role name."""
        return {role.name: role.num_replicas for role in self.app.roles}

    def message(self, cause: DockerReplica | None) -> str:
        """Describe the failure and the removed replicas; empty without either.

        Args:
            cause: the replica that failed first; None if none failed.
        """
        said = [cause.failure] if cause is not None else []
        said += [describe_removed(self.removed[0])] if self.removed else []
        said += [f"{len(self.removed) - 1} more were removed"] if len(self.removed) > 1 else []
        return "; ".join(said)

    def statuses(self, errors: Sequence[str]) -> list[RoleStatus]:
        """Return the status of every replica for ``torchx status``.

        Args:
            errors: the content of each replica's error file, in the order of ``replicas``; empty without an error.
        """
        statuses = {
            (replica.role, replica.id): ReplicaStatus(
                id=replica.id,
                state=self._shown(replica),
                role=replica.role,
                hostname=replica.name,
                structured_error_msg=error or "<NONE>",
            )
            for replica, error in zip(self.replicas, errors, strict=True)
        }
        removed = {
            (role.name, index): ReplicaStatus(id=index, state=AppState.UNKNOWN, role=role.name, hostname="")
            for role in self.app.roles
            for index in range(role.num_replicas)
            if f"{role.name}/{index}" in self.removed
        }
        statuses |= removed
        return [
            RoleStatus(role, [statuses[each] for each in sorted(statuses) if each[0] == role])
            for role in dict.fromkeys([*self.sizes, *(replica.role for replica in self.replicas)])
        ]

    def _shown(self, replica: DockerReplica) -> AppState:
        """Return the state to show for a replica: CANCELLED rather than FAILED if it was stopped with the app."""
        if self.overall.state is AppState.SUCCEEDED and replica.ended <= self.overall.decided:
            return replica.state  # may be a failure that the role tolerates
        over = self.overall.state in (AppState.CANCELLED, AppState.SUCCEEDED)
        return AppState.CANCELLED if over and replica.state is not AppState.SUCCEEDED else replica.state


def describe_removed(replica: str) -> str:
    """Describe a replica whose container was removed."""
    return f"the container of replica {replica} was removed (docker rm), and its log with it"


def build_snapshot(app_id: str, containers: Sequence[Container], cancelled: float, ends: FinalStates) -> DockerSnapshot:
    """Assemble the snapshot of an app.

    Args:
        app_id: the app's id.
        containers: its containers; at least one.
        cancelled: when it was cancelled, in seconds since the epoch; 0 if it was not.
        ends: the results that its hosts have written.
    """
    labels = containers[0].labels
    app = appdef_codec.unpack(labels[request.LABEL_APP]) or AppDef(app_id)
    order = [role.name for role in app.roles]
    pairs = list(zip(ends.apply(containers), containers, strict=True))
    pairs.sort(key=lambda pair: (order.index(pair[0].role) if pair[0].role in order else len(order), pair[0].id))
    roles: dict[str, list[DockerReplica]] = {name: [] for name in order}
    for replica, _ in pairs:
        roles.setdefault(replica.role, []).append(replica)
    removed = _removed(app.roles, roles)
    # Hosts wait forever for a removed host. A removed container of another role may have ended before.
    hosts = {role.name for role in app.roles if CREDENTIALS in role.env}
    policies = {role.name: RolePolicy.of(role) for role in app.roles}
    found = []
    for name, replicas in roles.items():
        lost = frozenset(int(index) for role, _, index in (one.rpartition("/") for one in removed) if role == name)
        policy = policies.get(name) or RolePolicy(len(replicas))
        found.append(DockerRole(policy, replicas, lost if name in hosts else frozenset()))
    grace = float(labels.get(request.LABEL_GRACE, 0))
    overall = status.evaluate(found, cancelled, time.time(), grace + HOST_EXTRA)
    created = min(container.attrs["Created"] for container in containers)
    return DockerSnapshot(
        app_id, app, [container for _, container in pairs], list(roles.values()), removed, overall, grace, created
    )


def _removed(wanted: Sequence[Role], found: Mapping[str, Sequence[DockerReplica]]) -> list[str]:
    if not any(replica.started for replicas in found.values() for replica in replicas):
        return []  # schedule() creates all containers before it starts the first: the others may not exist yet
    there = {f"{replica.role}/{replica.id}" for replicas in found.values() for replica in replicas}
    every = [f"{role.name}/{index}" for role in wanted for index in range(role.num_replicas)]
    return [name for name in every if name not in there]
