# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The hosts of a live allocation as this process reaches them: found, waited for, and missed when they have ended."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torchx_monarch.client.connection import Connection, ask
from torchx_monarch.client.target import Target
from torchx_monarch.exceptions import AllocationError, RefusedError, UnreachableError

if TYPE_CHECKING:
    from torchx.runner import Runner

T = TypeVar("T")

START_TIMEOUT = 600.0
"""Seconds that a request waits for hosts that are not there yet, where its user does not say another number."""

_POLL = 0.05
"""Seconds between two looks at hosts that are not ready."""

_POLL_AT_MOST = 2.0

_ASK_SCHEDULER_EVERY = 5.0
"""Seconds; it serves everybody."""

_SAY_WHY_AFTER = 5.0
"""Seconds of waiting until it is said why hosts that run are not reached: they may be about to listen."""

_ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")


def say(text: str) -> None:
    """Show a line about the hosts to a person."""
    print(f"[monarch] {text}", file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True)
class JobStatus:
    """A live allocation.

    Attributes:
        state: TorchX's name of the app's state.
        ready: whether runs can begin at once.
        hosts: names of the machines that have come, by replica.
        missing: replicas that have not.
        run: the run that is going on; None for none.
        runs: how many have ended.
        warm: interpreters of the first host that wait with torch imported.
        idle: seconds since the last run.
        idle_timeout: after how many of them the hosts end; 0 for never.
        message: why it cannot be reached, or what its scheduler says of its end.
    """

    state: str
    ready: bool = False
    hosts: Mapping[int, str] = dataclasses.field(default_factory=dict)
    missing: Sequence[int] = ()
    run: int | None = None
    runs: int = 0
    warm: int = 0
    idle: float = 0.0
    idle_timeout: float = 0.0
    message: str = ""


class Hosts:
    """Reaches the replica 0 of one role of an app.

    Args:
        handle: of the app.
        role: name of the role; empty for the first.
        address: where replica 0 is reached from here, where the scheduler cannot say: it is out of reach as well, and
            not asked for the app's state.
        runner: TorchX's; one is made where none is given.
        start_timeout: seconds that ``reach`` waits for hosts; None for no limit.
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
        self._runner = runner
        self._start_timeout = start_timeout
        self._target: Target | None = None
        self._unreached: UnreachableError | RefusedError = UnreachableError("")
        self._were_ready = False
        self._was_reached = False
        self._killed = False
        self._scheduler_says = ("", "")
        self._scheduler_asked = -_ASK_SCHEDULER_EVERY

    def __getstate__(self) -> dict[str, Any]:
        asked = -_ASK_SCHEDULER_EVERY  # the clock is that of this boot of this machine
        return {**self.__dict__, "_runner": None, "_target": None, "_scheduler_asked": asked}

    @property
    def runner(self) -> Runner:
        """TorchX's."""
        if self._runner is None:
            from torchx.runner import get_runner

            self._runner = get_runner()
        return self._runner

    @property
    def target(self) -> Target:
        """Where replica 0 listens.

        Raises:
            UnreachableError: that is not known here, or the app was killed from here.
        """
        if self._killed:
            raise UnreachableError(f"{self.handle} was killed")
        if self._target is None:
            self._target = Target.of(self.handle, self._role, self._address, self._runner)
        return self._target

    def kill(self) -> None:
        """Have the scheduler end the app; one that has ended is left alone."""
        self.runner.cancel(self.handle)
        self._killed = True
        self._scheduler_asked = -_ASK_SCHEDULER_EVERY

    def look(self) -> JobStatus | None:
        """What the hosts say of themselves; None where they cannot be reached, or are being ended from here."""
        try:
            answer = ask(self.target, {"type": "look"})
        except (UnreachableError, RefusedError) as error:
            self._miss(error)
            return None
        if answer.get("over"):
            self._miss(UnreachableError("they are ending"))
            return None
        live = answer.get("live")
        if live is None:
            return JobStatus("RUNNING", message=f"{self.handle} is no allocation that waits for runs")
        return JobStatus(
            state="RUNNING",
            ready=live["ready"],
            hosts={host["replica"]: host["hostname"] for host in answer["hosts"]},
            missing=answer["missing"],
            run=live["run"],
            runs=live["runs"],
            warm=live["warm"],
            idle=live["idle"],
            idle_timeout=live["idle_timeout"],
        )

    def status(self) -> JobStatus:
        """What the hosts say, or where they cannot be reached their scheduler."""
        if (status := self.look()) is not None:
            return status
        state, message = self._ask_scheduler() if not self._address else ("UNKNOWN", "")
        return JobStatus(state, message=message or str(self._unreached))

    def reach(self, operation: Callable[[Target], T], ready: bool = False, wait: bool = True) -> T:
        """Do something with the hosts; where they cannot be reached, wait for them and do it then.

        A given address that has answered before is not waited for: no scheduler can say whether its hosts have ended.

        Args:
            operation: gets where replica 0 listens; it may be done again when it has raised ``UnreachableError``.
            ready: wait until runs can begin, where these hosts have not been seen like that before.
            wait: whether to wait at all.

        Raises:
            AllocationError: the hosts have ended, or are not there in time.
            UnreachableError: they cannot be reached, and waiting does not help, or is not wanted.
            RefusedError: replica 0 does not answer this client.
        """
        if self._were_ready or not ready:
            try:
                result = operation(self.target)
                self._was_reached = True
                return result
            except UnreachableError as error:
                self._miss(error)
                if not wait or (self._address and self._was_reached):
                    self.check_alive()
                    raise
        self.wait(self._start_timeout, say, ready)
        return operation(self.target)

    def open(self, greeting: dict[str, Any], ready: bool = False, wait: bool = True) -> Connection:
        """Connect and send a greeting; arguments and exceptions are those of ``reach``."""
        return self.reach(lambda target: Connection.open(target, greeting), ready, wait)

    def ask(self, greeting: dict[str, Any], wait: bool = True) -> dict[str, Any]:
        """Send a request that may be sent twice, and return its answer; arguments and exceptions as for ``reach``."""
        return self.reach(lambda target: ask(target, greeting), wait=wait)

    def wait(
        self,
        timeout: float | None,
        on_progress: Callable[[str], None] | None = None,
        ready: bool = True,
        warm: bool = False,
    ) -> None:
        """Wait until the hosts answer.

        Args:
            timeout: seconds; None for no limit.
            on_progress: called with a line whenever what is waited for changes.
            ready: wait as well until runs can begin at once.
            warm: wait as well until interpreters have imported torch.

        Raises:
            AllocationError: they have ended, or it takes longer.
            UnreachableError: they cannot be reached, and waiting does not help.
            RefusedError: replica 0 does not answer this client.
        """
        started, pause, said = time.monotonic(), _POLL, ""
        while True:
            status = self.look()
            self._was_reached = self._was_reached or status is not None
            if status is not None and status.message:
                raise AllocationError(status.message)
            if status is None:
                waiting = self._missing_since(started)
            elif ready and not status.ready:
                waiting = f"hosts {', '.join(map(str, status.missing))}" if status.missing else "the mesh"
            elif warm and not status.warm:
                waiting = "the interpreters"
            else:
                self._were_ready = self._were_ready or status.ready
                return
            if waiting != said and on_progress is not None:
                on_progress(f"waiting for {waiting}")
            said = waiting
            if timeout is not None and time.monotonic() > started + timeout:
                raise AllocationError(f"{self.handle} is not ready after {timeout:g} s: waiting for {said}")
            time.sleep(pause)
            pause = min(pause * 1.2, _POLL_AT_MOST)

    def check_alive(self) -> None:
        """Refuse to go on where the scheduler says that there are no hosts any more; it is asked every few seconds.

        Raises:
            AllocationError: naming the state in which they have ended.
        """
        if self._address and not self._killed:
            return
        if time.monotonic() > self._scheduler_asked + _ASK_SCHEDULER_EVERY:
            self._ask_scheduler()
        state, message = self._scheduler_says
        if state == "UNKNOWN" and message:
            raise AllocationError(message)
        if state in _ENDED:
            raise AllocationError(f"{self.handle} has ended ({state}){': ' + message if message else ''}")

    def _missing_since(self, started: float) -> str:
        """Describe what is waited for while replica 0 cannot be reached; raise where waiting does not help."""
        self.check_alive()
        if isinstance(self._unreached, RefusedError) or self._unreached.final:
            raise self._unreached
        if self._killed:
            return "the end of the hosts"
        if self._address:
            return f"an answer at {self._address}: {self._unreached}"
        state, _ = self._scheduler_says
        why = state == "RUNNING" and time.monotonic() > started + _SAY_WHY_AFTER
        return f"the hosts ({state}){f': {self._unreached}' if why else ''}"

    def _miss(self, error: UnreachableError | RefusedError) -> None:
        self._unreached = error
        self._were_ready = False
        self._target = None  # a host that was replaced may be elsewhere

    def _ask_scheduler(self) -> tuple[str, str]:
        """The app's state by its scheduler, and why it has ended."""
        from torchx.specs import NONE  # half of what torchx costs to import; a run on hosts that live needs none of it

        self._scheduler_asked = time.monotonic()
        status = self.runner.status(self.handle)
        if status is None:
            self._scheduler_says = "UNKNOWN", f"{self.handle} does not exist"
        else:
            said = status.is_terminal() and status.msg != NONE
            self._scheduler_says = str(status.state.name), status.msg if said else ""
        return self._scheduler_says
