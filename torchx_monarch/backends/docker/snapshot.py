# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""An app, from the containers of it that there are."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchx.specs import AppDef, AppState, ReplicaStatus, Role, RoleStatus

from torchx_monarch.backends import appdef_codec
from torchx_monarch.backends.docker import request, status
from torchx_monarch.backends.docker.final_states import Ends
from torchx_monarch.backends.docker.status import DockerReplica, DockerRole, DockerStatus
from torchx_monarch.backends.outcome import RolePolicy
from torchx_monarch.backends.protocols import CREDENTIALS

if TYPE_CHECKING:
    from docker.models.containers import Container

HOST_EXTRA = 10.0
"""Seconds that a container gets beyond the grace: within the grace the host in it ends its ranks."""


@dataclass(frozen=True)
class DockerSnapshot:
    """An app: its containers, sorted by role and replica, and what they say of themselves.

    Attributes:
        roles: the replicas of each role that have a container, in the app's order; a role may have none.
        removed: the replicas, as ROLE/K, whose containers somebody has removed.
    """

    app_id: str
    app: AppDef
    containers: list[Container]
    roles: list[list[DockerReplica]]
    removed: list[str]
    evaluate: DockerStatus
    grace: float
    created: str

    @property
    def replicas(self) -> list[DockerReplica]:
        """As the containers are sorted."""
        return [replica for role in self.roles for replica in role]

    @property
    def sizes(self) -> dict[str, int]:
        """How many replicas each role has."""
        return {role.name: role.num_replicas for role in self.app.roles}

    def message(self, cause: DockerReplica | None) -> str:
        """Why it has failed, or what is wrong with it; empty for neither.

        Args:
            cause: the replica that has failed; None for none.
        """
        said = [cause.failure] if cause is not None else []
        said += [gone(self.removed[0])] if self.removed else []
        said += [f"{len(self.removed) - 1} more were removed"] if len(self.removed) > 1 else []
        return "; ".join(said)

    def statuses(self, errors: Sequence[str]) -> list[RoleStatus]:
        """What ``torchx status`` shows of the replicas, given the error of each that has a container."""
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
        """A replica's state beside the app's: one that was ended because all was over has not failed."""
        if self.evaluate.state is AppState.SUCCEEDED and replica.ended <= self.evaluate.decided:
            return replica.state  # perhaps a failure that the role tolerates
        over = self.evaluate.state in (AppState.CANCELLED, AppState.SUCCEEDED)
        return AppState.CANCELLED if over and replica.state is not AppState.SUCCEEDED else replica.state


def gone(replica: str) -> str:
    """What to say of a replica without a container."""
    return f"the container of replica {replica} was removed (docker rm), and its log with it"


def understood(app_id: str, containers: Sequence[Container], cancelled: float, ends: Ends) -> DockerSnapshot:
    """The app of which these are the containers.

    Args:
        cancelled: when it was cancelled, in seconds since the epoch; 0 for not.
        ends: what its hosts have noted.
    """
    labels = containers[0].labels
    app = appdef_codec.unpack(labels[request.LABEL_APP]) or AppDef(app_id)
    order = [role.name for role in app.roles]
    pairs = list(zip(ends.applied(containers), containers, strict=True))
    pairs.sort(key=lambda pair: (order.index(pair[0].role) if pair[0].role in order else len(order), pair[0].id))
    roles: dict[str, list[DockerReplica]] = {name: [] for name in order}
    for replica, _ in pairs:
        roles.setdefault(replica.role, []).append(replica)
    removed = _removed(app.roles, roles)
    # Hosts wait in vain for one that is not started again. Of others each may have ended, and been cleared away.
    hosts = {role.name for role in app.roles if CREDENTIALS in role.env}
    policies = {role.name: RolePolicy.of(role) for role in app.roles}
    found = []
    for name, replicas in roles.items():
        lost = frozenset(int(index) for role, _, index in (one.rpartition("/") for one in removed) if role == name)
        policy = policies.get(name) or RolePolicy(len(replicas))
        found.append(DockerRole(policy, replicas, lost if name in hosts else frozenset()))
    grace = float(labels.get(request.LABEL_GRACE, 0))
    evaluate = status.evaluate(found, cancelled, time.time(), grace + HOST_EXTRA)
    created = min(container.attrs["Created"] for container in containers)
    return DockerSnapshot(
        app_id, app, [container for _, container in pairs], list(roles.values()), removed, evaluate, grace, created
    )


def _removed(wanted: Sequence[Role], found: Mapping[str, Sequence[DockerReplica]]) -> list[str]:
    if not any(replica.started for replicas in found.values() for replica in replicas):
        return []  # all are made before the first is started: they may be just about to be
    there = {f"{replica.role}/{replica.id}" for replicas in found.values() for replica in replicas}
    every = [f"{role.name}/{index}" for role in wanted for index in range(role.num_replicas)]
    return [name for name in every if name not in there]
