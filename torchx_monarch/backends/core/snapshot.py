# SPDX-License-Identifier: BSD-3-Clause
"""What a backend reads: the state of an app at one time, from which ``core.state.reduce`` derives the app's state; and
lines of a replica's log, with the times that Docker and Kubernetes write before lines and into their objects.

Standard library only: the local supervisor and Slurm's batch step import this module.
"""

from __future__ import annotations

import math
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torchx_monarch.insight.events import Event
from torchx_monarch.model.codec import Seconds
from torchx_monarch.model.host_result import HostResult
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.model.state import State

STOP_CODES = (128 + signal.SIGTERM, 128 + signal.SIGKILL)
"""The exit codes of a container that was stopped: SIGKILL follows after the grace period."""

if TYPE_CHECKING:
    from torchx.specs import AppDef


S = TypeVar("S", bound="AppSnapshot")

_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)")


@dataclass(frozen=True)
class Outcome:
    """How an app has ended, or is to end.

    Attributes:
        state: SUCCEEDED, FAILED or CANCELLED; a backend's own controller may also report PENDING or RUNNING.
        message: the reason, for users; empty for none.
        error: the content of the root cause's error file, as JSON text; empty for none; None to take it from the
            replicas.
        time: when it was decided, in seconds since the epoch; 0 if unknown.
        grace: seconds from SIGTERM to SIGKILL that were asked for; None for the app's own run option.
    """

    state: State
    message: str = ""
    error: str | None = None
    time: Seconds = 0.0
    grace: float | None = None


@dataclass(frozen=True)
class ReplicaSnapshot:
    """One replica.

    Attributes:
        state: its own state, regardless of the rest of the app. FAILED only if it is not restarted; UNKNOWN if its
            record was removed from the backend, with the exit code.
        hostname: the name of its machine or container; empty if unknown.
        address: its network address, if that suits clients better than the name; empty if unknown.
        started: when its latest start began, in seconds since the epoch; 0 for never.
        ended: when it last ended, in seconds since the epoch; 0 for never, or if unknown.
        exit_code: exit code of its latest end, -n or 128+n for signal n; None if it runs, or the code is not known.
        restarts: how often the backend has restarted it.
        rank_restarts: how often its host has restarted ranks, as far as known and not among the app's events.
        failure: how it failed, in one line that names the replica; empty if it has not.
        error: the content of its error file, as JSON text; empty without one, or in a brief snapshot.
        waiting: why it cannot be started now; empty for normal progress.
        is_stuck: whether it could not be started for so long that the app fails.
        is_stopping: whether it was asked to stop already.
        was_stopped: whether it ended because it was asked to: it is not the root cause then.
        is_error_lost: whether its error file may be missing: there was no room for it, or it was removed.
    """

    role: str
    id: int
    state: State
    hostname: str = ""
    address: str = ""
    started: float = 0.0
    ended: float = 0.0
    exit_code: int | None = None
    restarts: int = 0
    rank_restarts: int = 0
    failure: str = ""
    error: str = ""
    waiting: str = ""
    is_stuck: bool = False
    is_stopping: bool = False
    was_stopped: bool = False
    is_error_lost: bool = False

    @property
    def name(self) -> str:
        """ROLE/ID, as messages name it."""
        return f"{self.role}/{self.id}"

    @property
    def is_alive(self) -> bool:
        """Whether it runs or may still start."""
        return self.state in (State.PENDING, State.RUNNING)

    @property
    def distance(self) -> tuple[bool, bool, bool, bool, bool, float]:
        """How far its failure is from the root cause, as a sort key: the root cause comes first.

        Replicas that were stopped come last, then those that report only a secondary failure, a failure of another
        replica, those whose record was removed, and those that had no room for an error file.
        """
        result = HostResult.from_text(self.error)
        return (
            self.was_stopped,
            result.is_secondary,
            result.replica not in (self.id, -1),
            self.state is State.UNKNOWN,
            self.is_error_lost and not self.error,
            self.ended,
        )


@dataclass(frozen=True)
class RoleSnapshot:
    """One role.

    Attributes:
        replicas: its replicas, by index.
        finished: the state in which the backend's own controller has ended the role; None if it has not, or there is
            no such controller.
        reason: what that controller waits for, or why it has ended the role; empty if it does not say.
    """

    spec: RoleSpec
    replicas: Sequence[ReplicaSnapshot]
    finished: State | None = None
    reason: str = ""

    def _failed_ids(self) -> set[int]:
        # A host whose record was removed has failed: the other hosts wait for it. Another program may have ended well,
        # and so has a host if another one has: a host succeeds only when the whole role has.
        waits = self.spec.runs_hosts and not any(replica.state is State.SUCCEEDED for replica in self.replicas)
        lost = {State.FAILED, State.UNKNOWN} if waits else {State.FAILED}
        return {replica.id for replica in self.replicas if replica.state in lost}

    @property
    def failures(self) -> list[ReplicaSnapshot]:
        """The replicas that have failed for good; empty while the role tolerates their failure."""
        failed = self._failed_ids()
        return [] if self.spec.tolerates(failed) else [replica for replica in self.replicas if replica.id in failed]

    @property
    def stuck(self) -> list[ReplicaSnapshot]:
        """The replicas that cannot be started, unless the role has enough others and spare hosts."""
        stuck = [replica for replica in self.replicas if replica.is_stuck]
        needless = self.spec.spares and self.spec.tolerates(self._failed_ids() | {replica.id for replica in stuck})
        return [] if needless else stuck

    @property
    def has_succeeded(self) -> bool:
        """Whether the role has succeeded, perhaps with failed replicas that it tolerates."""
        # A Job of Kubernetes in which one index has failed ends as failed, though the role may tolerate that.
        if self.finished is State.SUCCEEDED:
            return True
        failed = self._failed_ids()
        ended = (State.SUCCEEDED, State.UNKNOWN)
        succeeded = {replica.id for replica in self.replicas if replica.state in ended} - failed
        return any(replica.state is not State.UNKNOWN for replica in self.replicas) and self.spec.succeeded(
            succeeded, failed
        )

    @property
    def has_failed(self) -> bool:
        """Whether the backend's own controller says that the role has failed."""
        return self.finished is State.FAILED and not self.has_succeeded


@dataclass(frozen=True)
class AppSnapshot:
    """One app.

    Attributes:
        roles: its roles, in the order of the AppDef.
        app: the app as the user wrote it; None if the backend does not know it.
        created: when it was submitted, in seconds since the epoch; 0 if unknown.
        started: when it first began to run; 0 to take it from the replicas, each of which tells its latest start.
        grace: seconds from SIGTERM to SIGKILL when its replicas are stopped.
        native: the state that the backend's own controller has decided; None if it follows from the replicas.
        ending: how this package has begun to end the app, as the backend has stored it; None if it has not.
        restarts: how often the app, a role or a replica was restarted; None to count it from the replicas.
        events: its events (``insight.events``), as far as the backend reads them; empty in a brief snapshot.
        last_sign_of_life: when a host of replica 0 gave one last (``insight.events``); 0 if unknown.
        notes: further facts for users, which are appended to the message unless they are the message.
        ui_url: where a browser shows the app; empty if nowhere.
    """

    app_id: str
    name: str
    roles: Sequence[RoleSnapshot]
    app: AppDef | None = None
    created: float = 0.0
    started: float = 0.0
    grace: float = 30.0
    native: Outcome | None = None
    ending: Outcome | None = None
    restarts: int | None = None
    events: Sequence[Event] = ()
    last_sign_of_life: float = 0.0
    notes: Sequence[str] = field(default_factory=tuple)
    ui_url: str = ""

    @property
    def replicas(self) -> list[ReplicaSnapshot]:
        """All replicas, role by role."""
        return [replica for role in self.roles for replica in role.replicas]


class TimedLines(NamedTuple):
    """Lines of a replica's log that were written at the same time, or a part of a line.

    Attributes:
        time: when they were written, in seconds since the epoch, as exactly as the backend knows it; 0 if it does not.
        text: the lines with their line ends. A part of an unfinished line, such as a progress bar, has no line end, and
            the text that follows it is the rest of this line, or another part, alone.
        end: where they end in the log, in bytes; 0 if the backend does not tell.
    """

    time: float
    text: str
    end: int = 0


@dataclass(frozen=True)
class LogQuery(Generic[S]):
    """Which lines of a replica's log to return.

    Attributes:
        since: skip lines written before it; a time without zone is local time; None for no limit.
        until: skip lines written after it; None for no limit.
        stream: ``stdout`` or ``stderr`` alone; empty for both together.
        tail: return at least the last ``tail`` of these lines, and the ones that follow; 0 for all of them. A backend
            may return more, or ignore it: it saves reading a long log.
        ranks: lines of other ranks may be left out, and do not count for ``tail``, as far as the backend knows the
            rank of a line; empty for all ranks.
        follow: whether to wait for more lines until the app has ended; False with ``until``.
        latest: returns the app's current snapshot; None if the app was removed.
        has_ended: returns whether the app has ended or was removed.
    """

    since: datetime | None = None
    until: datetime | None = None
    stream: str = ""
    tail: int = 0
    ranks: Sequence[range] = ()
    follow: bool = False
    latest: Callable[[], S | None] = field(default=lambda: None)
    has_ended: Callable[[], bool] = field(default=lambda: True)

    def reads(self, poll: float, settle: float = 0.0) -> Iterator[bool]:
        """Yield before each read of the log whether it is the last one; a log that is followed is read again and again.

        The end is asked for before the read: what was written just before it is then read, too.

        Args:
            poll: seconds between two reads.
            settle: seconds after the end in which lines may still arrive.
        """
        last_at, is_last = math.inf if self.follow else 0.0, False
        while not is_last:
            if last_at == math.inf and self.has_ended():
                last_at = time.monotonic() + settle
            yield (is_last := time.monotonic() >= last_at)
            time.sleep(0 if is_last else poll)


def nanoseconds(text: str) -> int:
    """Convert ``2026-11-20T10:11:12.123456789Z`` to nanoseconds since the epoch; 0 for Go's zero time and other texts.

    ``datetime`` has microseconds only, and Python 3.10's ``fromisoformat`` reads no ``Z``.
    """
    found = _TIME.fullmatch(text)
    if found is None or text.startswith("0001-"):
        return 0
    whole = datetime.fromisoformat(found[1] + found[3].replace("Z", "+00:00"))
    return int(whole.timestamp()) * 10**9 + int((found[2] or "").ljust(9, "0")[:9])


def seconds(text: str | None) -> float:
    """Convert such a time to seconds since the epoch; 0.0 for None and where ``nanoseconds`` is 0."""
    whole, part = divmod(nanoseconds(text or ""), 10**9)
    return whole + part / 1e9
