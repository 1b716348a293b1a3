# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Coordination of the roles of an app: they end and restart together where the backend lets each role end by itself.

Replica 0 of every other role is connected to replica 0 of the first role. When a role fails or its replica 0 is lost,
the first role makes all other roles end as well, and the backend restarts them. Replica 0 of the first role ends last
and puts off hosts that are restarted before then, so no role starts while ranks of an earlier start are running.

This applies to ``RetryPolicy.APPLICATION`` with retries, and always where the end of the first role ends all roles (AWS
Batch). On AWS Batch, replica 0 of the first role also waits for the success of the other roles, except sidecars.

=========================  =======================================================================================
other role to the first    ``link`` (greeting, with role and start), ``held`` (from then on its loss counts as a
                           failure), ``ended`` (with code, reason and stopped)
first role to another      ``linked``, ``refused``, ``again`` (with code, reason and stopped), ``over``
=========================  =======================================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence

from torchx_monarch.controller.host_events import HostJoined, HostLost, Interrupted, StopRequested
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.rendezvous import LaterError, Rendezvous
from torchx_monarch.controller.role_registry import role_of, start_of_app
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.transport import connections, local_addresses, messages
from torchx_monarch.transport.connections import Address, ConnectError

_TRY_EVERY = 0.05
"""Seconds between the first two tries to reach the first role's replica 0; each further pause is longer."""

_TRY_AT_LEAST_EVERY = 5.0

_LINKED_WITHIN = 5.0
"""Seconds for which the first role waits for the others before it starts. Roles that are not linked yet would not learn
of its failure if it failed immediately."""

_TOLD_WITHIN = 1.0
"""Seconds for which a failed other role waits for its link to the first role, over which it reports the failure."""

_ANSWER_TIMEOUT = 10.0

_RESTART_NOTE = "the application begins again, while retries are left"


class RoleCoordinator:
    """Replica 0's part in the coordination. This base class is for roles that restart separately, and does nothing.

    Args:
        role: the host's role.
        rendezvous: the rendezvous of that role.
        start: identifies this start of the app; empty if the backend provides no identifier.
    """

    def __init__(self, role: str, rendezvous: Rendezvous, start: str = "") -> None:
        self._role = role
        self._start = start
        self._rendezvous = rendezvous
        self._told = ""

    @staticmethod
    def of(
        options: HostSpec, environ: Mapping[str, str], rendezvous: Rendezvous, host_network: HostNetwork
    ) -> RoleCoordinator:
        """Create the coordinator for a replica 0 from its options and environment.

        Raises:
            NetworkError: the address of the first role's replica 0 is in an environment variable that is not set.
            AddressError: the address of the first role's replica 0 is not valid.
        """
        role, start = options.role, start_of_app(environ)
        if not options.application:
            return RoleCoordinator(role, rendezvous)
        # Each role has its own port or socket file, so this part of the address identifies the role.
        is_first = options.application.rpartition(":")[2] == str(host_network.rendezvous).rpartition(":")[2]
        first = Address.parse(local_addresses.expand_address(options.application, environ, is_first), "--application")
        if is_first:
            return _MainRole(role, rendezvous, start, options.beside, options.await_role)
        told_within = options.host_timeout if role in options.await_role else 0.0
        return _OtherRole(role, rendezvous, start, first, host_network, told_within)

    async def begin(self, reporter: Reporter, timeout: float) -> None:
        """Wait until no host of an earlier start of the app is left, for ``timeout`` seconds or until a host event."""

    async def _until(self, event: asyncio.Event, reporter: Reporter, timeout: float, what: Callable[[], str]) -> None:
        """Wait for an event for at most ``timeout`` seconds. A host event ends the wait and stays pending."""
        waiting = self._rendezvous.events.interrupt(asyncio.wait_for(event.wait(), timeout))
        with contextlib.suppress(asyncio.TimeoutError, Interrupted):
            await reporter.while_waiting(waiting, what)

    async def await_others(self, verdict: JobResult, reporter: Reporter, timeout: float) -> JobResult:
        """Wait, on the first role after its success, for the success of the roles in ``await_roles``.

        Args:
            verdict: the result of this role.
            reporter: writes progress lines.
            timeout: seconds for each of those roles to arrive.

        Returns:
            The same verdict, or the failure of another role, or the verdict of a stop request to this host.
        """
        return verdict

    async def end(self, verdict: JobResult, timeout: float) -> None:
        """Send the verdict to the other roles. The first role then waits up to ``timeout`` seconds for their ends."""

    def _fail(self, code: int, reason: str, stopped: bool = False) -> None:
        self._told = reason
        verdict = JobResult(code or 1, reason, stopped=stopped, consequence=True, replica=0)
        self._rendezvous.events.post(StopRequested(0, verdict))

    def _result_message(self, kind: str, verdict: JobResult) -> messages.Message:
        """Return the message with the result of this role. A reason that came from another role is kept unchanged."""
        replica = verdict.cause.replica if verdict.cause else max(0, verdict.replica)
        reason = verdict.reason[: messages.MAX_ERROR]
        if verdict.reason != self._told:
            reason = f"{self._role}/{replica} failed: {reason}; {_RESTART_NOTE}"
        return {"type": kind, "code": verdict.code, "reason": reason, "stopped": verdict.stopped}

    def _adopt_result(self, word: messages.Message) -> None:
        """End this role with the result of another role."""
        code = word.get("code")
        self._fail(code if isinstance(code, int) else 1, str(word.get("reason")), word.get("stopped") is True)


class _MainRole(RoleCoordinator):
    """The coordinator on replica 0 of the first role.

    Args:
        beside: number of other roles.
        awaited: names of the roles whose success this role awaits before it ends.
    """

    def __init__(self, role: str, rendezvous: Rendezvous, start: str, beside: int, awaited: Sequence[str] = ()) -> None:
        super().__init__(role, rendezvous, start)
        self._beside = beside
        self._awaited = set(awaited)
        self._arrived: set[str] = set()
        self._succeeded: set[str] = set()
        self._complete = asyncio.Event()
        self._links: dict[str, asyncio.StreamWriter] = {}
        self._changed = asyncio.Event()
        self._ending = False
        rendezvous.clients["link"] = self._link

    async def begin(self, reporter: Reporter, timeout: float) -> None:
        if self._beside:
            await self._until(self._complete, reporter, min(timeout, _LINKED_WITHIN), lambda: "the other roles")

    async def await_others(self, verdict: JobResult, reporter: Reporter, timeout: float) -> JobResult:
        def left() -> str:
            return f"the end of role {', '.join(sorted(self._awaited - self._succeeded))}"

        if verdict.code:
            return verdict
        return await reporter.while_waiting(self._others_succeeded(verdict, timeout), left)

    async def _others_succeeded(self, verdict: JobResult, timeout: float) -> JobResult:
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        while left := self._awaited - self._succeeded:
            missing = sorted(left - self._arrived)
            if missing and loop.time() >= until:
                names = ", ".join(missing)
                return JobResult(1, f"replica 0 of role {names} has not arrived in {timeout:g} s (--host-timeout)")
            changed = asyncio.wait_for(self._changed.wait(), until - loop.time() if missing else None)
            try:
                # This role has succeeded: its hosts that leave, or arrive too late, change nothing.
                with contextlib.suppress(asyncio.TimeoutError):
                    await self._rendezvous.events.interrupt(
                        changed, lambda event: not isinstance(event, (HostLost, HostJoined))
                    )
            except Interrupted as interruption:
                return interruption.event.result
        return verdict

    async def end(self, verdict: JobResult, timeout: float) -> None:
        self._ending = True
        message = self._result_message("again", verdict) if verdict.code else {"type": "over"}
        for writer in list(self._links.values()):
            await messages.send(writer, message)
        until = asyncio.get_running_loop().time() + (timeout if verdict.code else 0.0)
        while self._links and (left := until - asyncio.get_running_loop().time()) > 0:
            changed = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait([changed], timeout=left)
            changed.cancel()

    async def _link(
        self, greeting: messages.Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        role = role_of(greeting, writer, self._start, "link a role")
        if role in self._links and not self._ending:
            self._fail_with({"reason": f"replica 0 of role {role!r} was started again; {_RESTART_NOTE}"})
        if self._ending:
            raise LaterError(f"the hosts of role {self._role!r} are ending, to begin again")
        self._links[role] = writer
        try:
            await messages.send(writer, {"type": "linked"})
            if await messages.receive(reader, _ANSWER_TIMEOUT) is None:
                return  # the other role ended before it could confirm the link
            self._arrived.add(role)
            if len(self._links) >= self._beside:
                self._complete.set()
            word = await messages.receive(reader) or {"reason": f"replica 0 of role {role!r} was lost; {_RESTART_NOTE}"}
            if word.get("code") != 0:
                self._fail_with(word)
            await reader.read(1)  # replica 0 is the last host of its role to end
            if word.get("code") == 0:
                self._succeeded.add(role)
        except (messages.ProtocolError, TimeoutError) as error:
            self._fail_with({"reason": f"replica 0 of role {role!r} sent an invalid message: {error}; {_RESTART_NOTE}"})
        finally:
            del self._links[role]
            self._changed.set()
            self._changed = asyncio.Event()

    def _fail_with(self, word: messages.Message) -> None:
        if not self._ending:
            self._ending = True  # from here on, a replica 0 that connects belongs to the next start
            self._adopt_result(word)


class _OtherRole(RoleCoordinator):
    """The coordinator on replica 0 of another role.

    Args:
        first: address on which replica 0 of the first role listens.
        told_within: seconds for which a role that has succeeded waits for its link to report the success; 0 if the
            first role does not await it.
    """

    def __init__(
        self,
        role: str,
        rendezvous: Rendezvous,
        start: str,
        first: Address,
        host_network: HostNetwork,
        told_within: float = 0.0,
    ) -> None:
        super().__init__(role, rendezvous, start)
        self._first = first
        self._told_within = told_within
        self._host_network = host_network
        self._why = "no answer yet"
        self._clear = asyncio.Event()
        self._linked = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._ended = False
        self._keeping = asyncio.ensure_future(self._stay_linked())

    async def begin(self, reporter: Reporter, timeout: float) -> None:
        await self._until(self._clear, reporter, timeout, lambda: f"the first role's replica 0 ({self._why})")

    async def end(self, verdict: JobResult, timeout: float) -> None:
        self._ended = True
        within = _TOLD_WITHIN if verdict.code else self._told_within
        if within and not self._linked.is_set():
            await asyncio.wait([asyncio.ensure_future(self._linked.wait())], timeout=within)
        if self._writer is not None:
            await messages.send(self._writer, self._result_message("ended", verdict))

    async def _stay_linked(self) -> None:
        """Keep trying to connect to the first role. This role starts without it if nothing listens there."""
        pause = _TRY_EVERY
        while True:
            try:
                reader, writer = await connections.connect(
                    self._first, self._host_network.identity, self._host_network.options.peer_timeout
                )
                try:
                    if await self._greeted(reader, writer):
                        return await self._follow(reader)
                finally:
                    self._writer = None
                    writer.close()
            except ConnectError:
                self._clear.set()
            await asyncio.sleep(pause)
            pause = min(1.2 * pause, _TRY_AT_LEAST_EVERY) if self._clear.is_set() else _TRY_EVERY

    async def _greeted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        greeting = {"type": "link", "version": messages.VERSION, "role": self._role, "start": self._start}
        await messages.send(writer, greeting)
        try:
            answer = await messages.receive(reader, _ANSWER_TIMEOUT)
        except (messages.ProtocolError, TimeoutError):
            answer = None
        if answer is None or not answer.get("later"):
            self._clear.set()
        if answer is None or answer.get("type") != "linked":
            self._why = str((answer or {}).get("reason"))
            return False
        self._writer = writer  # before the first await: from ``linked`` on, an end without a message counts as a loss
        self._linked.set()
        await messages.send(writer, {"type": "held"})
        return True

    async def _follow(self, reader: asyncio.StreamReader) -> None:
        try:
            message = await messages.receive(reader)
        except messages.ProtocolError:
            message = None
        if message and message.get("type") == "over":
            return
        if not self._ended:
            self._adopt_result(message or {"reason": f"replica 0 of the first role was lost; {_RESTART_NOTE}"})
        await asyncio.Event().wait()  # keep the connection open: it shows that hosts of this role still exist
