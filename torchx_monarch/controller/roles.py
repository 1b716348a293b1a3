# SPDX-License-Identifier: BSD-3-Clause
"""The coordination of roles that end together: they restart together (``RetryPolicy.APPLICATION``), or none restarts.

Backends let each role end by itself. So replica 0 of every further role connects to that of the first one, the server,
which tells all when one has failed, without the help of the submitting machine. The first role ends last, and puts off
hosts that are restarted before then, so no role starts while ranks of an earlier start are running. Where all others
are its sidecars, such as the meshes of a controller's script, its success ends them.

=======================  =========================================================================================
other role to server     ``register-role`` (greeting, with its name), ``ready`` (from then on its loss counts as a
                         failure), ``ended`` (with the result of the role)
server to other role     ``registered``, ``refused``, ``restart`` (with the result of the role that failed), ``done``
=======================  =========================================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from torchx_monarch.controller.host_events import Changes, StopRequested
from torchx_monarch.controller.host_network import LaterError, Peer, RendezvousError
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.controller.rendezvous_client import PutOffError, open_channel
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.codec import DecodeError, decode
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.transport import messages
from torchx_monarch.transport.channel import Channel
from torchx_monarch.transport.connections import Address
from torchx_monarch.transport.lease import Leases
from torchx_monarch.transport.local_addresses import expand_address

_TRY_FOR = 5.0
"""Seconds for which a role tries to reach the server before it counts as not there."""

_REGISTER_AGAIN = 0.5
"""Seconds between the loss of the server, or its refusal, and the next try to reach it."""

_REGISTERED_WITHIN = 5.0
"""Seconds for which the first role waits for the others before it starts. Roles that have not registered yet would not
learn of its failure if it failed immediately."""

_REPORTED_WITHIN = 1.0
"""Seconds for which another role that has ended waits for its connection to the server, over which it says so."""

_READY_TIMEOUT = 10.0

_NOTE = "all roles end with it, and begin again while retries are left"


class RoleServer:
    """The server, on replica 0 of the first role."""

    def __init__(self, rendezvous: Rendezvous, options: HostSpec, reporter: Reporter) -> None:
        self._options = options
        self._events = rendezvous.events
        self._reporter = reporter
        self._rendezvous = rendezvous
        self._links: dict[str, Channel] = {}  # to the other roles
        self._arrived: set[str] = set()
        self._adopted = ""
        self._changes = Changes()
        self._ending = False
        rendezvous.network.handlers["register-role"] = self._register

    async def begin(self, timeout: float) -> None:
        """Wait briefly until the other roles are ready to start, at most ``timeout`` s, or until a host event."""
        peers = self._options.peer_roles
        all_ready = self._changes.until(lambda: len(self._arrived) >= peers, min(timeout, _REGISTERED_WITHIN))
        await self._reporter.while_waiting(self._events.until_event(all_ready), lambda: "the other roles")

    async def end(self, result: JobResult, timeout: float) -> None:
        """Send the result to the other roles. After a failure wait up to ``timeout`` s for their ends."""
        self._ending = True
        message: messages.Message = {"type": "done"}
        if result.code:
            message = {"type": "restart", **_explained(result, self._options.role, self._adopted)}
        for channel in list(self._links.values()):
            channel.finish()
            await channel.send(message)
        await self._changes.until(lambda: not self._links, timeout if result.code else 0.0)

    async def _register(self, peer: Peer) -> None:
        role = decode(str, peer.greeting.get("role"), "role")
        if role in self._links and not self._ending:
            self._fail(f"replica 0 of role {role!r} was started again")
        if self._ending:
            raise LaterError(f"the hosts of role {self._options.role!r} are ending, to begin again")
        with self._rendezvous.channel(peer, f"replica 0 of role {role!r}") as channel:
            self._links[role] = channel
            self._changes.notify()
            try:
                await self._follow(role, channel)
                # Returns at the end of the channel: replica 0 is the last host of its role to end.
                await channel.receive()
            finally:
                del self._links[role]
                self._changes.notify()

    async def _follow(self, role: str, channel: Channel) -> None:
        try:
            if await asyncio.wait_for(channel.receive(), _READY_TIMEOUT) is None:
                return  # the other role ended before it was ready
            self._arrived.add(role)
            self._changes.notify()
            message = await channel.receive()
            channel.peer_has_ended()
            ended = None if message is None else decode(JobResult, message)
        except asyncio.TimeoutError:
            return self._fail(f"replica 0 of role {role!r} was not ready in {_READY_TIMEOUT:g} s")
        except (messages.ProtocolError, DecodeError) as error:
            return self._fail(f"replica 0 of role {role!r} sent an invalid message: {error}")
        if ended is None:
            self._fail(f"replica 0 of role {role!r} {channel.loss}")
        elif ended.code:
            self._adopt(ended)

    def _fail(self, reason: str) -> None:
        self._adopt(JobResult(1, f"{reason}; {_NOTE}"))

    def _adopt(self, ended: JobResult) -> None:
        if not self._ending:
            self._ending = True  # from here on, a replica 0 that connects belongs to the next start
            self._adopted = ended.reason
            self._events.post(_failure(ended))


class RoleClient:
    """The client of the server, on replica 0 of another role."""

    def __init__(self, rendezvous: Rendezvous, server: Address, reporter: Reporter) -> None:
        self._events = rendezvous.events
        self._network = rendezvous.network
        self._server = server
        self._reporter = reporter
        self._why = "no answer yet"
        self._may_begin = asyncio.Event()
        self._registered: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
        self._ended = False
        self._connection = asyncio.ensure_future(self._stay_registered())

    async def begin(self, timeout: float) -> None:
        """Wait until the first role answers, or nothing listens there; at most ``timeout`` s, or until a host event."""
        waiting = self._events.until_event(self._may_begin.wait(), seconds=timeout)
        with contextlib.suppress(asyncio.TimeoutError):
            await self._reporter.while_waiting(waiting, lambda: f"the first role's replica 0 ({self._why})")

    async def end(self, result: JobResult, timeout: float) -> None:
        """Send the result to the first role, if it is there."""
        self._ended = True
        await asyncio.wait([self._registered], timeout=_REPORTED_WITHIN)
        if self._registered.done():
            message = {"type": "ended", **_explained(result, self._network.options.role)}
            await self._registered.result().send(message)

    def _not_registered(self, error: Exception) -> None:
        self._why = str(error)
        if not isinstance(error, PutOffError):  # nothing listens there, so no earlier start is left
            self._may_begin.set()

    async def _stay_registered(self) -> None:
        """Register, and again after a refusal: the role starts without the server if nothing listens there."""
        greeting = {"type": "register-role", "role": self._network.options.role}
        while True:
            try:
                _, channel = await open_channel(self._network, self._server, greeting, _TRY_FOR, self._not_registered)
                break
            except RendezvousError:
                await asyncio.sleep(_REGISTER_AGAIN)
        self._may_begin.set()
        self._registered.set_result(channel)
        leases = Leases(self._network.options.lease, lambda: [channel], sends=True)
        leases.start()
        try:
            await self._follow(channel)
        finally:
            leases.stop()
            channel.close()

    async def _follow(self, channel: Channel) -> None:
        await channel.send({"type": "ready"})
        ended = JobResult(1, f"replica 0 of the first role was lost; {_NOTE}")
        with contextlib.suppress(messages.ProtocolError, DecodeError):
            message = await channel.receive()
            channel.confirm()
            if message is None:
                ended = JobResult(1, f"replica 0 of the first role {channel.loss}; {_NOTE}")
            elif message.get("type") == "done":
                if self._network.options.sidecar == "on":
                    self._events.post(StopRequested(0, JobResult(0, "the app has ended with its first role")))
                return
            else:
                ended = decode(JobResult, message)
        if not self._ended:
            self._events.post(_failure(ended))
        await asyncio.Event().wait()  # keep the connection open: it shows that hosts of this role still exist


def coordinator(rendezvous: Rendezvous, environ: Mapping[str, str], reporter: Reporter) -> RoleServer | RoleClient:
    """Return the part of this replica 0 in the coordination. A server without other roles does nothing."""
    options = rendezvous.network.options
    if not options.application:
        return RoleServer(rendezvous, options, reporter)
    server = Address.parse(expand_address(options.application, environ, is_first=False), "--application")
    return RoleClient(rendezvous, server, reporter)


def _explained(result: JobResult, role: str, adopted: str = "") -> dict[str, Any]:
    """Return the result of a role for a message; ``adopted`` is the reason that came from another role, if one did."""
    replica = result.cause.replica if result.cause else max(0, result.replica)
    reason = result.reason[: messages.MAX_ERROR]
    if result.reason != adopted:
        reason = f"{role}/{replica} failed: {reason}; {_NOTE}"
    return {"code": result.code, "reason": reason, "stopped": result.stopped}


def _failure(ended: JobResult) -> StopRequested:
    return StopRequested(0, dataclasses.replace(ended, code=ended.code or 1, cause=None, consequence=True, replica=0))
