# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Derive the state of a replica from its container, and the state of an app from its replicas.

``backends.outcome`` has the rules by which roles and apps succeed or fail. An app has ended when no replica lives.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from torchx.schedulers.docker_scheduler import LABEL_REPLICA_ID, LABEL_ROLE_NAME
from torchx.specs import AppState, is_terminal

from torchx_monarch.backends import outcome
from torchx_monarch.backends.outcome import RolePolicy
from torchx_monarch.model.job_result import describe_code

SETTLE = 5.0
"""Seconds that the rest of a failed app gets to end by itself: its hosts stop when the job has failed."""

_LIVING = {
    "created": AppState.PENDING,
    "restarting": AppState.PENDING,
    "running": AppState.RUNNING,
    "paused": AppState.RUNNING,
}


@dataclass(frozen=True)
class DockerReplica:
    """The container of one replica.

    Attributes:
        role: name of its role.
        id: its number in the role.
        name: the container's name.
        status: dockerd's state, such as ``running``.
        code: exit code of its latest end: dockerd's (128+n for signal n), or the host's own result (-n) if ``final``.
        started: when its latest start began, in seconds since the epoch; 0 for never.
        ended: when it last ended, in seconds since the epoch; 0 for never.
        restarts: how often dockerd has restarted it.
        out_of_memory: whether the kernel killed a process in it because it was out of memory.
        error: dockerd's message for a container that could not start; empty otherwise.
        memory: memory limit in bytes; 0 for none.
        env: the environment of the container's command.
        final: why its host must not be restarted; empty if it may be.
        word: the content of the error file of a host that must not be restarted; empty otherwise.
    """

    role: str
    id: int
    name: str
    status: str
    code: int
    started: float
    ended: float
    restarts: int
    out_of_memory: bool
    error: str
    memory: int
    env: Mapping[str, str]
    final: str = ""
    word: str = ""

    @classmethod
    def of(cls, attrs: Mapping[str, Any]) -> DockerReplica:
        """Read the output of ``docker inspect``."""
        state, config = attrs["State"], attrs["Config"]
        return cls(
            role=config["Labels"][LABEL_ROLE_NAME],
            id=int(config["Labels"][LABEL_REPLICA_ID]),
            name=attrs["Name"].lstrip("/"),
            status=state["Status"],
            code=state["ExitCode"],
            started=seconds(state["StartedAt"]),
            ended=seconds(state["FinishedAt"]),
            restarts=attrs.get("RestartCount", 0),
            out_of_memory=state.get("OOMKilled", False),
            error=state.get("Error", ""),
            memory=attrs.get("HostConfig", {}).get("Memory", 0),
            env=dict(word.split("=", 1) for word in config.get("Env") or () if "=" in word),
        )

    @property
    def state(self) -> AppState:
        """The state of this replica, regardless of the rest of the app."""
        if self.status in _LIVING and not self.final:
            return _LIVING[self.status]
        return AppState.SUCCEEDED if self.code == 0 else AppState.FAILED

    @property
    def lives(self) -> bool:
        """Whether it runs or may still run."""
        return not is_terminal(self.state)

    @property
    def has_failed(self) -> bool:
        """Whether a start of it has failed, even if dockerd has restarted or will restart it."""
        return self.restarts > 0 or self.status == "restarting" or self.state is AppState.FAILED

    @property
    def restarts_needlessly(self) -> bool:
        """Whether dockerd keeps restarting it although its host must not be restarted."""
        return bool(self.final) and self.status in _LIVING

    @property
    def failure(self) -> str:
        """The reason why it failed, in one line."""
        how = self.error or describe_code(128 - self.code if self.code > 128 else self.code)
        if self.out_of_memory:
            how += f"; a process in it was killed for want of memory, of which it had {self.memory >> 20} MB (memMB)"
        final = f"; not started again: {self.final}" if self.final else ""
        return f"replica {self.role}/{self.id} {how}{final}"


@dataclass(frozen=True)
class DockerRole:
    """The replicas of one role.

    Attributes:
        policy: the rules by which the role succeeds or fails.
        replicas: the replicas that have a container.
        removed: the ids of hosts whose containers were removed; empty for a role that does not run hosts, because
            its replicas may have ended before.
    """

    policy: RolePolicy
    replicas: Sequence[DockerReplica]
    removed: frozenset[int] = frozenset()

    @property
    def _failed(self) -> set[int]:
        return {one.id for one in self.replicas if one.state is AppState.FAILED}

    @property
    def failed(self) -> list[DockerReplica]:
        """The replicas that have failed for good; empty while the role tolerates their failure."""
        if self.policy.tolerates(self._failed | self.removed):
            return []
        return [one for one in self.replicas if one.state is AppState.FAILED]

    @property
    def lost(self) -> bool:
        """Whether the role cannot continue without its removed replicas."""
        return bool(self.removed) and not self.policy.tolerates(self._failed | self.removed)

    @property
    def succeeded(self) -> bool:
        """Whether the role has succeeded. Replicas without a container count as ended successfully."""
        living = {one.id for one in self.replicas if one.lives}
        ended = set(range(self.policy.replicas)) - living - self._failed
        return bool(self.replicas) and self.policy.succeeded(ended, self._failed)


@dataclass(frozen=True)
class DockerStatus:
    """The state of an app.

    Attributes:
        state: TorchX's state; terminal only when no replica lives.
        cause: the replica that failed first; None if none failed, or if that is not why the app ended.
        needs_stop: whether the caller must stop the remaining containers: the app's result is decided, containers still
            run or are restarted by dockerd, and the time in which others would stop them has passed.
        decided: when the app succeeded, in seconds since the epoch; 0 if it has not.
    """

    state: AppState
    cause: DockerReplica | None = None
    needs_stop: bool = False
    decided: float = 0.0


def evaluate(roles: Sequence[DockerRole], cancelled: float, now: float, grace: float) -> DockerStatus:
    """Compute the state of an app.

    Args:
        roles: all roles of the app.
        cancelled: when it was cancelled, in seconds since the epoch; 0 if it was not.
        now: the time, in seconds since the epoch.
        grace: seconds in which the process that cancelled the app stops its containers.
    """
    everyone = [replica for role in roles for replica in role.replicas]
    # A container that was cancelled before its first start is never started.
    living = [replica for replica in everyone if replica.lives and not (cancelled and replica.status == "created")]
    failed = sorted((one for role in roles for one in role.failed), key=lambda replica: replica.ended)
    lost = any(role.lost for role in roles)
    if lost:  # a replica that was stopped because another was lost is not the cause
        failed = [replica for replica in failed if replica.code != 128 + signal.SIGTERM]
    awaited = outcome.awaited(roles)
    succeeded = all(role.succeeded for role in awaited)
    done = max(replica.ended for role in awaited for replica in role.replicas) if succeeded else 0.0
    decision, rest_until = None, now
    if succeeded and not (failed and failed[0].ended < done):
        decision, failed = AppState.SUCCEEDED, []
    elif cancelled:
        decision, rest_until, failed = AppState.CANCELLED, cancelled + grace + SETTLE, []
    elif failed:
        decision, rest_until = AppState.FAILED, failed[0].ended + SETTLE
    elif lost or not living:  # the exit codes of removed replicas are unknown
        decision = AppState.FAILED
    cause = failed[0] if failed else None
    if decision is not None and not living:
        return DockerStatus(
            decision, cause, needs_stop=any(replica.restarts_needlessly for replica in everyone), decided=done
        )
    running = decision is not None or any(replica.state is AppState.RUNNING for replica in living)
    return DockerStatus(
        AppState.RUNNING if running else AppState.PENDING,
        cause,
        needs_stop=decision is not None and now >= rest_until,
        decided=done,
    )


def seconds(text: str) -> float:
    """Convert dockerd's ``2026-11-20T10:11:12.123456789Z`` to seconds since the epoch; 0.0 for its zero time."""
    found = re.fullmatch(r"(\d+-\d+-\d+T\d+:\d+:\d+)(\.\d+)?(Z|[+-]\d+:\d+)", text)
    if found is None or text.startswith("0001-"):
        return 0.0
    zone = "+00:00" if found[3] == "Z" else found[3]
    whole = datetime.fromisoformat(found[1] + zone).astimezone(timezone.utc).timestamp()
    return whole + float(found[2] or 0)
