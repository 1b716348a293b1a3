# SPDX-License-Identifier: BSD-3-Clause
"""Reach the hosts of a live allocation: query their state, wait for them, and detect that they have ended."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torchx_monarch.client.connection import Connection, Target, ask
from torchx_monarch.exceptions import AllocationError, RefusedError, UnreachableError
from torchx_monarch.model.state import State
from torchx_monarch.schedulers.recorded_apps import LOCAL
from torchx_monarch.system.termination import closed_terminal_is_null

if TYPE_CHECKING:
    from torchx.runner import Runner

    from torchx_monarch.backends.core.apps import Apps
    from torchx_monarch.backends.core.snapshot import AppSnapshot
    from torchx_monarch.backends.core.state import AppStatus
    from torchx_monarch.client.result import RunInfo
    from torchx_monarch.schedulers.job_metrics import AttemptMetrics

T = TypeVar("T")

START_TIMEOUT = 600.0
"""Default number of seconds that a request waits for hosts that have not started yet."""

_POLL = 0.05
"""Seconds between the first two status requests to hosts that are not ready; each pause is longer than the last."""

_MAX_POLL_INTERVAL = 2.0
"""Longest pause between two status requests, in seconds."""

_ASK_SCHEDULER_EVERY = 5.0
"""Seconds between two status requests to the scheduler, which all users of a cluster share."""

_SHOW_ERROR_AFTER = 5.0
"""Seconds of waiting before progress lines include the connection error: hosts that just started do not listen yet."""


def say(text: str) -> None:
    """Print a progress line about the hosts to stderr."""
    with closed_terminal_is_null():
        print(f"[monarch] {text}", file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True)
class AllocationStatus:
    """The state of a live allocation. All fields but ``state`` and ``message`` are empty if it cannot be reached.

    Attributes:
        state: name of the app's TorchX state, such as ``RUNNING``; ``UNKNOWN`` if neither hosts nor scheduler tell it.
        ready: whether a run can start immediately.
        hosts: hostnames of the hosts that have joined, by replica id.
        missing: ids of the replicas whose hosts have not joined.
        run: number of the current run; None if no run is active.
        runs: number of runs that have ended.
        warm: whether the ranks of a run on the first host find torch imported.
        idle: seconds since the hosts were last used; 0 during a run.
        idle_timeout: seconds of idleness after which the hosts end; 0 for never.
        message: why the allocation cannot be reached, or the scheduler's reason for its end; empty if it is reachable.
    """

    state: str
    ready: bool = False
    hosts: Mapping[int, str] = dataclasses.field(default_factory=dict)
    missing: Sequence[int] = ()
    run: int | None = None
    runs: int = 0
    warm: bool = False
    idle: float = 0.0
    idle_timeout: float = 0.0
    message: str = ""


class UnknownAppError(AllocationError):
    """Raised when the scheduler does not know the app."""


class _NotReady(UnreachableError):
    """Raised when the hosts answer, and what is waited for is not there yet; the message names it."""


class _AppState(NamedTuple):
    """The state of the app as its scheduler has reported it; empty before the scheduler was asked.

    ``reason`` says why the app has ended or has not begun, if the scheduler tells. ``asked`` is the time of the
    answer, by ``time.monotonic``.
    """

    name: str = ""
    reason: str = ""
    asked: float = -_ASK_SCHEDULER_EVERY


class Hosts:
    """Send requests to replica 0 of one role of an app.

    Methods raise ``AllocationError`` if the hosts have ended or did not start in time, ``UnreachableError`` if they
    cannot be reached and waiting does not help, and ``RefusedError`` if replica 0 refuses the request or this client.

    Args:
        role: name of the role; empty for the first role.
        address: ``HOST:PORT`` at which this machine reaches replica 0; empty to ask the scheduler. With an address, the
            scheduler counts as unreachable too, and is never asked for the app's state.
        start_timeout: seconds that ``reach`` waits for the hosts; None for no limit.
    """

    def __init__(
        self,
        handle: str,
        role: str = "",
        address: str = "",
        runner: Runner | None = None,
        start_timeout: float | None = START_TIMEOUT,
    ) -> None:
        self.handle = handle
        self._role = role
        self._address = address
        self.runner = runner
        self._start_timeout = start_timeout
        self._target: Target | None = None
        self._has_answered = False
        self._is_released = False  # by this client, which asks them for nothing any more
        self._app_state = _AppState()

    @classmethod
    def of_ranks(cls, handle: str, role: str = "", address: str = "") -> Hosts:
        """Return the hosts that run the ranks of an app: its own, or those of the allocation on which it is a run.

        Raises:
            AllocationError: these do not execute that run now.
        """
        hosts = cls(handle, role, address)
        found = hosts.read_app() if handle.startswith(f"{LOCAL}://") else None
        allocation = found[0].roles[0].spec.allocation if found is not None else ""
        if found is None or not allocation:
            return hosts
        from torchx_monarch.schedulers.job_status import timeline_of

        own, hosts = timeline_of(*found, time.time()).spans_of("run"), cls(allocation, address=address)
        current = hosts.ask({"type": "state"}, wait=False)["live"]["run"]
        if not own or own[-1].number != current:
            what = f"was run {own[-1].number} of" if own else "waits for its turn on"
            now = "no run" if current is None else f"run {current}"
            raise AllocationError(f"{handle} {what} {allocation}, which has {now} now")
        return hosts

    def __getstate__(self) -> dict[str, Any]:
        # time.monotonic() has no meaning on another machine or after a reboot
        app_state = self._app_state._replace(asked=_AppState().asked)
        state = {**self.__dict__, "runner": None, "_target": None, "_app_state": app_state}
        state.pop("_apps", None)
        return state

    @functools.cached_property
    def _apps(self) -> Apps[Any]:
        """The apps of the scheduler."""
        from torchx_monarch.schedulers.monarch import scheduler_of

        return scheduler_of(self.handle.partition("://")[0], self.runner).apps

    @property
    def target(self) -> Target:
        """The address and credentials of replica 0; UnreachableError without them, and after ``release``."""
        if self._is_released:
            raise UnreachableError(f"{self.handle} was released")
        if self._target is None:
            self._target = Target.from_handle(self.handle, self._role, self._address, self.runner)
        return self._target

    @property
    def has_ended(self) -> bool:
        """Whether the scheduler has reported the end of the app when it was last asked."""
        return State(self._app_state.name or "UNKNOWN").is_terminal

    def roles(self) -> list[str]:
        """Return the names of the roles of the app that have hosts; that of this object first."""
        found = self.app_roles()
        first = self._role or next(iter(found), "")
        return [first, *(name for name in found if name != first)]

    def app_roles(self) -> list[str]:
        """Return the names of the roles of the app that have hosts; none with an address."""
        app = None if self._address else self.read_app()
        return [role.spec.name for role in app[0].roles if role.spec.workload] if app is not None else []

    def metrics(self, rank: int | None) -> list[AttemptMetrics]:
        """Return what a rank of the app has reported over time, as its scheduler and its logs on this machine tell."""
        from torchx_monarch.schedulers.job_metrics import read_metrics
        from torchx_monarch.schedulers.job_status import log_folder, timeline_of

        app = self.read_app()
        if app is None:
            raise UnknownAppError(f"{self.handle} is not known")
        return read_metrics(log_folder(app[0])[0], timeline_of(*app, time.time()), rank)

    def read_app(self, *, brief: bool = False) -> tuple[AppSnapshot, AppStatus] | None:
        """Return what the scheduler says of the app (``Apps.read``)."""
        return self._apps.read(self._app_id, brief=brief)

    @property
    def _app_id(self) -> str:
        from torchx.specs import parse_app_handle

        return str(parse_app_handle(self.handle)[2])

    def release(self) -> None:
        """Cancel the app through its scheduler; does nothing if the app has ended."""
        self._apps.cancel(self._app_id, waits=True)
        self._is_released, self._app_state = True, _AppState()

    def ask_status(self) -> AllocationStatus | None:
        """Ask replica 0 for the state of the allocation; return None if it cannot be reached or is ending."""
        with contextlib.suppress(UnreachableError, RefusedError):
            return self._read_status(self.target)
        self._target = None
        return None

    def status(self) -> AllocationStatus:
        """Return the state of the allocation, from replica 0 or, if that cannot be reached, from the scheduler."""
        try:
            return self._read_status(self.target)
        except (UnreachableError, RefusedError) as error:
            self._target = None
            app_state = self._ask_scheduler() if not self._address else _AppState("UNKNOWN")
            return AllocationStatus(app_state.name, message=app_state.reason or str(error))

    def _read_status(self, target: Target) -> AllocationStatus:
        answer = ask(target, {"type": "state"})
        if answer.get("ended"):
            raise UnreachableError("they are ending")
        live = answer.get("live")
        if live is None:
            return AllocationStatus("RUNNING", message=f"{self.handle} is not a live allocation")
        facts = {name: live[name] for name in ("ready", "run", "runs", "warm", "idle", "idle_timeout")}
        hosts = {host["replica"]: host["hostname"] for host in answer["hosts"]}
        return AllocationStatus("RUNNING", hosts=hosts, missing=answer["missing"], **facts)

    def reach(self, operation: Callable[[Target], T], wait: bool = True) -> T:
        """Call ``operation``; if the hosts cannot be reached, wait for them (see ``wait_for``) or raise."""
        if wait:
            return self.wait_for(operation, self._start_timeout, say)
        try:
            return operation(self.target)
        except UnreachableError as error:
            self._target = None
            self.check_alive()
            if error.final or not self._app_state.name:
                raise
            role = f" of role {self._role}" if self._role else ""
            why = (
                f"{self.handle} is {self._app_state.name}, and no host{role} answers: {self._app_state.reason or error}"
            )
            raise UnreachableError(f"{why}. To see more: torchx monarch status {self.handle}") from None

    def open(self, greeting: dict[str, Any], wait: bool = True) -> Connection:
        """Connect to replica 0 and send a greeting; wait and raise as ``reach`` does."""
        return self.reach(lambda target: Connection.open(target, greeting), wait)

    def ask(self, greeting: dict[str, Any], wait: bool = True) -> dict[str, Any]:
        """Send an idempotent request to replica 0, and return its answer; wait and raise as ``reach`` does."""
        return self.reach(lambda target: ask(target, greeting), wait)

    def runs(self) -> list[RunInfo]:
        """Return the runs that the hosts know, the ended ones first, then the current one and the queue."""
        runs: list[RunInfo] = self.ask({"type": "runs"})["runs"]
        return runs

    def wait(self, timeout: float | None, on_progress: Callable[[str], None] | None = None, warm: bool = False) -> None:
        """Wait until a run can start immediately, or with ``warm`` until its ranks find torch imported.

        ``on_progress`` is called with a line each time the reason for waiting changes.
        """

        def check(target: Target) -> None:
            status = self._read_status(target)
            if status.message:
                scheduler = self.handle.partition("://")[0]
                advice = f"to get one: torchx run -s {scheduler} monarch.hosts -j 1x4"
                raise AllocationError(f"{status.message}; {advice}")
            if not status.ready:
                raise _NotReady(f"hosts {', '.join(map(str, status.missing))}" if status.missing else "the mesh")
            if warm and not status.warm:
                raise _NotReady("the import of torch")

        self.wait_for(check, timeout, on_progress)

    def wait_for(
        self, operation: Callable[[Target], T], timeout: float | None, on_progress: Callable[[str], None] | None
    ) -> T:
        """Call ``operation`` until it does not raise ``UnreachableError``, or waiting does not help; return its result.

        It must be repeatable. The other arguments are as for ``wait``.
        """
        started, pause, reported = time.monotonic(), _POLL, ""
        while True:
            try:
                result = operation(self.target)
                self._has_answered = True
                return result
            except _NotReady as error:
                reason = str(error)
            except UnreachableError as error:
                self._target = None  # the scheduler may have restarted replica 0 at another address
                reason = self._reason_to_wait(error, time.monotonic() - started)
            if reason != reported and on_progress is not None:
                on_progress(f"waiting for {reason}")
            reported = reason
            if timeout is not None and time.monotonic() > started + timeout:
                raise AllocationError(f"{self.handle} is not ready after {timeout:g} s: waiting for {reason}")
            time.sleep(pause)
            pause = min(pause * 1.2, _MAX_POLL_INTERVAL)

    def check_alive(self) -> None:
        """Raise if the scheduler reports that the app has ended. Asks the scheduler at most every few seconds."""
        if self._address and not self._is_released:
            return
        if time.monotonic() > self._app_state.asked + _ASK_SCHEDULER_EVERY:
            self._ask_scheduler()
        name, reason, _ = self._app_state
        if name == "UNKNOWN" and reason:
            raise UnknownAppError(reason)
        if self.has_ended:
            why = f": {reason}" if reason else ""
            raise AllocationError(f"{self.handle} has ended ({name}){why}. Its log: torchx log {self.handle}")

    def _reason_to_wait(self, error: UnreachableError, seconds: float) -> str:
        """Return what hosts that were not reached for some seconds are waited for; raise if waiting does not help.

        An address from the user that has answered before is not waited for: no scheduler can tell whether the hosts
        behind it have ended.
        """
        self.check_alive()
        if error.final or (self._address and self._has_answered and not self._is_released):
            raise error
        if self._is_released:
            return "the end of the hosts"
        if self._address:
            return f"an answer at {self._address}: {error}"
        name, reason, _ = self._app_state
        if name == "RUNNING" and seconds > _SHOW_ERROR_AFTER:
            reason = str(error)
        return f"the hosts ({name}){f': {reason}' if reason else ''}"

    def _ask_scheduler(self) -> _AppState:
        found = self.read_app(brief=True)
        if found is None:
            name, reason = "UNKNOWN", f"{self.handle} does not exist"
        else:
            name, reason = found[1].state.value, found[1].message
            if name in ("RUNNING", "UNKNOWN"):
                reason = ""
        self._app_state = _AppState(name, reason, time.monotonic())
        return self._app_state
