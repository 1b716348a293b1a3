# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What dockerd says of a container, what that means for a replica, and what follows for the app.

Who decides the end is said in ``backends.outcome``. The app has ended when nothing of it lives any more.
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
"""Seconds that the rest of a failed app gets to end by itself: its hosts carry the verdict out."""

_LIVING = {
    "created": AppState.PENDING,
    "restarting": AppState.PENDING,
    "running": AppState.RUNNING,
    "paused": AppState.RUNNING,
}


@dataclass(frozen=True)
class DockerReplica:
    """One container.

    Attributes:
        status: dockerd's word.
        code: of its latest end, -n for signal n where dockerd tells 128+n.
        started, ended: of its latest start, in seconds since the epoch; 0 for never.
        restarts: how often dockerd has started it again.
        out_of_memory: whether a process in it was killed for want of memory.
        error: what dockerd says of a container that it could not start.
        memory: its limit in bytes; 0 for none.
        env: the environment that it was given.
        final: why its host is not to be started again; empty where it may be.
        word: the content of the error file of such a host.
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
        """From what ``docker inspect`` shows."""
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
        """Of this replica alone."""
        if self.status in _LIVING and not self.final:
            return _LIVING[self.status]
        return AppState.SUCCEEDED if self.code == 0 else AppState.FAILED

    @property
    def lives(self) -> bool:
        """Whether it runs or may yet run."""
        return not is_terminal(self.state)

    @property
    def has_failed(self) -> bool:
        """Whether a start of it has failed, perhaps not for good."""
        return self.restarts > 0 or self.status == "restarting" or self.state is AppState.FAILED

    @property
    def is_restless(self) -> bool:
        """Whether dockerd goes on starting it in vain."""
        return bool(self.final) and self.status in _LIVING

    @property
    def failure(self) -> str:
        """Why it failed, in one line."""
        how = self.error or describe_code(128 - self.code if self.code > 128 else self.code)
        if self.out_of_memory:
            how += f"; a process in it was killed for want of memory, of which it had {self.memory >> 20} MB (memMB)"
        final = f"; not started again: {self.final}" if self.final else ""
        return f"replica {self.role}/{self.id} {how}{final}"


@dataclass(frozen=True)
class DockerRole:
    """One role.

    Attributes:
        policy: what decides how it ends.
        replicas: those that have a container.
        removed: the numbers of those that have none any more and cannot have ended without.
    """

    policy: RolePolicy
    replicas: Sequence[DockerReplica]
    removed: frozenset[int] = frozenset()

    @property
    def _failed(self) -> set[int]:
        return {one.id for one in self.replicas if one.state is AppState.FAILED}

    @property
    def failed(self) -> list[DockerReplica]:
        """Its replicas that have failed for good; none while the role tolerates that."""
        if self.policy.tolerates(self._failed | self.removed):
            return []
        return [one for one in self.replicas if one.state is AppState.FAILED]

    @property
    def lost(self) -> bool:
        """Whether the role cannot go on for want of a replica that was removed."""
        return bool(self.removed) and not self.policy.tolerates(self._failed | self.removed)

    @property
    def succeeded(self) -> bool:
        """Whether the role has. One of which some replicas are removed has if the others say so."""
        living = {one.id for one in self.replicas if one.lives}
        ended = set(range(self.policy.replicas)) - living - self._failed
        return bool(self.replicas) and self.policy.succeeded(ended, self._failed)


@dataclass(frozen=True)
class DockerStatus:
    """How an app stands.

    Attributes:
        state: its state; terminal only when nothing of it lives.
        decided: when it had succeeded, in seconds since the epoch; 0 where it has not.
        cause: the replica that failed first; None where none has, or where that is not why it ended.
        unended: whether it is decided and there is still a part that lives, or that dockerd starts in vain, and nobody
            else is to end that part.
    """

    state: AppState
    cause: DockerReplica | None = None
    unended: bool = False
    decided: float = 0.0


def evaluate(roles: Sequence[DockerRole], cancelled: float, now: float, grace: float) -> DockerStatus:
    """How an app stands whose roles these are.

    Args:
        cancelled: when it was cancelled, in seconds since the epoch; 0 for not.
        now: seconds since the epoch.
        grace: seconds in which who has cancelled it ends it.
    """
    everyone = [replica for role in roles for replica in role.replicas]
    # What was cancelled before it was started will never be.
    living = [replica for replica in everyone if replica.lives and not (cancelled and replica.status == "created")]
    failed = sorted((one for role in roles for one in role.failed), key=lambda replica: replica.ended)
    lost = any(role.lost for role in roles)
    if lost:  # what was ended for that is not the cause
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
    elif lost or not living:  # how those ended that were removed is not known
        decision = AppState.FAILED
    cause = failed[0] if failed else None
    if decision is not None and not living:
        return DockerStatus(decision, cause, unended=any(replica.is_restless for replica in everyone), decided=done)
    running = decision is not None or any(replica.state is AppState.RUNNING for replica in living)
    return DockerStatus(
        AppState.RUNNING if running else AppState.PENDING,
        cause,
        unended=decision is not None and now >= rest_until,
        decided=done,
    )


def seconds(text: str) -> float:
    """The time that dockerd writes as ``2026-11-20T10:11:12.123456789Z``, since the epoch; 0.0 for its zero time."""
    found = re.fullmatch(r"(\d+-\d+-\d+T\d+:\d+:\d+)(\.\d+)?(Z|[+-]\d+:\d+)", text)
    if found is None or text.startswith("0001-"):
        return 0.0
    zone = "+00:00" if found[3] == "Z" else found[3]
    whole = datetime.fromisoformat(found[1] + zone).astimezone(timezone.utc).timestamp()
    return whole + float(found[2] or 0)
