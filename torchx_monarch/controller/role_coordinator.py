# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""All roles of an app end together, to begin again, where a backend lets each role end by itself.

Replica 0 of every other role is linked to replica 0 of the first one. When a role has failed, or its replica 0 is lost,
the first one has all others end as well, and the backend starts them again. Replica 0 of the first role goes last, and
puts off the hosts that are started before that: so no role begins while another one's earlier ranks are there.
So it is with ``RetryPolicy.APPLICATION`` and retries, and always where the end of the first role is the end of all
(AWS Batch). There replica 0 of the first role also waits for the success of the others, but for that of sidecars.

=========================  =======================================================================================
other role to the first    ``link`` (greeting, with role and start), ``held`` (it counts from now on), ``ended`` (with
                           code, reason and stopped)
first role to another      ``linked``, ``refused``, ``again`` (with the same), ``over``
=========================  =======================================================================================
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.host_options import HostOptions
from torchx_monarch.controller.rendezvous import JOINED, HostEvent, LaterError, Rendezvous
from torchx_monarch.controller.role_registry import role_of, start_of_app
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.transport import connections, local_addresses, messages
from torchx_monarch.transport.connections import Address, ConnectError

_TRY_EVERY = 0.05
"""Seconds between two tries to reach the first role's replica 0 at first; each wait is longer than the one before."""

_TRY_AT_LEAST_EVERY = 5.0

_LINKED_WITHIN = 5.0
"""Seconds that the first role waits for others before it begins: one that fails at once would not be told to them."""

_TOLD_WITHIN = 1.0
"""Seconds that another role which fails at once takes to be linked, so as to tell it."""

_ANSWER_TIMEOUT = 10.0

_AGAIN = "the application begins again, while retries are left"


class RoleCoordinator:
    """Replica 0's part in it; of an app whose roles begin again each by itself there is nothing to do.

    Args:
        role: the host's own.
        rendezvous: its role's.
        start: which start of the app this is; empty where the backend does not say.
    """

    def __init__(self, role: str, rendezvous: Rendezvous, start: str = "") -> None:
        self._role = role
        self._start = start
        self._rendezvous = rendezvous
        self._told = ""

    @staticmethod
    def of(
        options: HostOptions, environ: Mapping[str, str], rendezvous: Rendezvous, host_network: HostNetwork
    ) -> RoleCoordinator:
        """A replica 0's part, by its options and environment.

        Raises:
            NetworkError: where the first role's replica 0 listens is in a variable that says nothing.
            AddressError: it is no address.
        """
        role, start = options.role, start_of_app(environ)
        if not options.application:
            return RoleCoordinator(role, rendezvous)
        # Each role has a port of its own, or a socket file.
        is_first = options.application.rpartition(":")[2] == str(host_network.rendezvous).rpartition(":")[2]
        first = Address.parse(local_addresses.expanded(options.application, environ, is_first), "--application")
        if is_first:
            return _MainRole(role, rendezvous, start, options.beside, options.await_roles)
        told_within = options.host_timeout if role in options.await_roles else 0.0
        return _OtherRole(role, rendezvous, start, first, host_network, told_within)

    async def begin(self, reporter: Reporter, timeout: float) -> None:
        """Wait until nothing of an earlier start of the app is there; for at most ``timeout`` seconds, or trouble."""

    async def _until(self, event: asyncio.Event, reporter: Reporter, timeout: float, what: Callable[[], str]) -> None:
        """Wait for an event, for so many seconds at most; trouble, which is left where it is, ends the wait."""
        host_events = self._rendezvous.host_events
        wanted, host_event = asyncio.ensure_future(event.wait()), asyncio.ensure_future(host_events.get())
        waiting = asyncio.wait([wanted, host_event], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        try:
            await reporter.while_waiting(waiting, what)
        finally:
            wanted.cancel()
            host_event.cancel()
        if host_event.done() and not host_event.cancelled():
            host_events.put_nowait(host_event.result())

    async def await_others(self, verdict: JobResult, reporter: Reporter, timeout: float) -> JobResult:
        """Wait, on the first role when it has succeeded, for the success of the roles that the app waits for.

        Args:
            verdict: how this role has ended.
            reporter: says what is waited for.
            timeout: seconds that such a role has to arrive.

        Returns:
            The same verdict, or the failure of another role, or that this host was told to end meanwhile.
        """
        return verdict

    async def end(self, verdict: JobResult, timeout: float) -> None:
        """Tell the other roles how this one has ended; the first one waits for their ends, for ``timeout`` seconds."""

    def _fail(self, code: int, reason: str, stopped: bool = False) -> None:
        self._told = reason
        verdict = JobResult(code or 1, reason, stopped=stopped, consequence=True, replica=0)
        self._rendezvous.host_events.put_nowait(HostEvent(0, verdict, lost=False))

    def _word(self, kind: str, verdict: JobResult) -> messages.Message:
        """How this role has ended; what it was told itself is passed on as it is."""
        replica = verdict.cause.replica if verdict.cause else max(0, verdict.replica)
        reason = verdict.reason[: messages.MAX_ERROR]
        if verdict.reason != self._told:
            reason = f"{self._role}/{replica} failed: {reason}; {_AGAIN}"
        return {"type": kind, "code": verdict.code, "reason": reason, "stopped": verdict.stopped}

    def _heed(self, word: messages.Message) -> None:
        """End as another role has."""
        code = word.get("code")
        self._fail(code if isinstance(code, int) else 1, str(word.get("reason")), word.get("stopped") is True)


class _MainRole(RoleCoordinator):
    """Replica 0 of the first role.

    Args:
        beside: how many other roles there are.
        awaited: the names of those whose success this one waits for before it ends.
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
            changed = asyncio.ensure_future(self._changed.wait())
            came = asyncio.ensure_future(self._rendezvous.host_events.get())
            try:
                within = until - loop.time() if missing else None
                await asyncio.wait([changed, came], timeout=within, return_when=asyncio.FIRST_COMPLETED)
                # This role has succeeded already: hosts of its own that leave, or come too late, change nothing.
                if came.done() and not (came.result().lost or came.result().kind == JOINED):
                    return came.result().verdict
            finally:
                changed.cancel()
                came.cancel()
        return verdict

    async def end(self, verdict: JobResult, timeout: float) -> None:
        self._ending = True
        message = self._word("again", verdict) if verdict.code else {"type": "over"}
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
            self._lose({"reason": f"replica 0 of role {role!r} was started again; {_AGAIN}"})
        if self._ending:
            raise LaterError(f"the hosts of role {self._role!r} are ending, to begin again")
        self._links[role] = writer
        try:
            await messages.send(writer, {"type": "linked"})
            if await messages.receive(reader, _ANSWER_TIMEOUT) is None:
                return  # it had ended before it could say how
            self._arrived.add(role)
            if len(self._links) >= self._beside:
                self._complete.set()
            word = await messages.receive(reader) or {"reason": f"replica 0 of role {role!r} was lost; {_AGAIN}"}
            if word.get("code") != 0:
                self._lose(word)
            await reader.read(1)  # it goes last of its role
            if word.get("code") == 0:
                self._succeeded.add(role)
        except (messages.ProtocolError, TimeoutError) as error:
            self._lose({"reason": f"replica 0 of role {role!r} does not speak as it should: {error}; {_AGAIN}"})
        finally:
            del self._links[role]
            self._changed.set()
            self._changed = asyncio.Event()

    def _lose(self, word: messages.Message) -> None:
        if not self._ending:
            self._ending = True  # from now on whoever comes is of the next start
            self._heed(word)


class _OtherRole(RoleCoordinator):
    """Replica 0 of another role.

    Args:
        first: where that of the first role listens.
        told_within: seconds that it takes, when it has succeeded, to be linked and say so; 0 where nobody waits for it.
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
        self._keeping = asyncio.ensure_future(self._keep())

    async def begin(self, reporter: Reporter, timeout: float) -> None:
        await self._until(self._clear, reporter, timeout, lambda: f"the first role's replica 0 ({self._why})")

    async def end(self, verdict: JobResult, timeout: float) -> None:
        self._ended = True
        within = _TOLD_WITHIN if verdict.code else self._told_within
        if within and not self._linked.is_set():
            await asyncio.wait([asyncio.ensure_future(self._linked.wait())], timeout=within)
        if self._writer is not None:
            await messages.send(self._writer, self._word("ended", verdict))

    async def _keep(self) -> None:
        """Be linked as soon as that is possible. A first role that is not there, or not yet, is not waited for."""
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
        self._writer = writer  # before anything is awaited: from that word on an end without one is a loss
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
            self._heed(message or {"reason": f"replica 0 of the first role was lost; {_AGAIN}"})
        await asyncio.Event().wait()  # the connection shows that something of this role is still there
