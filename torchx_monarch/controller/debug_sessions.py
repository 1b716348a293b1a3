# SPDX-License-Identifier: BSD-3-Clause
"""Connect clients on replica 0 with the ranks that wait in a breakpoint.

For each rank that waits, its host has a connection to replica 0, and passes it on to the rank; replica 0 passes
messages on between it and that of a client. Whichever ends first, the other one is closed.

=========================  =======================================================================================
rank to replica 0          ``breakpoint`` (greeting: ``rank``, ``pid``, ``file``, ``line``, ``function``, and ``wait``,
                           the seconds for which it waits), ``output`` (``data``), ``end`` (``reason``)
client to replica 0        ``breakpoints`` (greeting; the answer has ``ranks``, a list of greetings of ranks with
                           ``attached``), ``debug`` (greeting: ``rank``, ``kind`` of terminal, ``rows``, ``columns``),
                           ``input`` (``data``), ``size`` (``rows``, ``columns``), ``detach``
replica 0 to a rank        ``attach`` (``kind``, ``rows``, ``columns``), the client's messages, and ``expired`` when no
                           client has come in time
replica 0 to a client      ``attached``, ``output``, and ``end``
=========================  =======================================================================================

``data`` are bytes of a terminal, as characters of the same numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Callable
from contextlib import AbstractContextManager

from torchx_monarch.controller.rendezvous import Peer, RendezvousError, Serve
from torchx_monarch.system.untrusted_text import one_line
from torchx_monarch.transport import messages


@dataclasses.dataclass(eq=False)
class _Waiting:
    """A rank in a breakpoint, whose greeting describes it, and the client that is attached."""

    rank: Peer
    client: Peer | None = None
    end: str = ""
    """What has become of the rank; empty if that is not known."""


class DebugSessions:
    """Serve the greetings of ranks and clients (see ``Rendezvous.clients``).

    Args:
        report: reports an event with its rank (``Reporter.note``).
        rest: returns a context within which ranks that wait for others are no hang.
    """

    def __init__(
        self, command: str, report: Callable[..., None], rest: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.clients: dict[str, Serve] = {
            "breakpoint": self._serve_rank,
            "breakpoints": self._list,
            "debug": self._serve_client,
        }
        self._command = command
        self._report = report
        self._rest = rest
        self._ranks: dict[int, _Waiting] = {}

    async def _serve_rank(self, peer: Peer) -> None:
        rank, wait = peer.greeting.get("rank"), peer.greeting.get("wait")
        if peer.is_client:
            raise RendezvousError("a client cannot wait in a breakpoint")
        if type(rank) is not int or not isinstance(wait, (int, float)):
            raise RendezvousError(f"rank={rank!r:.20} is no number")
        file = os.path.basename(str(peer.greeting.get("file")))
        place = one_line(f"{file}:{peer.greeting.get('line')} in {peer.greeting.get('function')}", 300)
        text = f"rank {rank} waits at {place} for {wait:g} s. Debug it: {self._command} --rank {rank}"
        self._report("breakpoint", text, rank=rank)
        waiting = self._ranks[rank] = _Waiting(peer)

        def expire() -> None:
            if waiting.client is None:
                waiting.end = f"goes on: no debugger was attached within {wait:g} s (-cfg debug_wait)"
                peer.writer.write(messages.encode({"type": "expired"}))

        timer = asyncio.get_running_loop().call_later(wait, expire)
        try:
            with self._rest():
                while message := await peer.receive():
                    if message.get("type") == "end":
                        waiting.end = waiting.end or one_line(str(message.get("reason")), 200)
                        break
                    if waiting.client is not None:
                        await waiting.client.send(message)
        finally:
            timer.cancel()
            if self._ranks.get(rank) is waiting:
                del self._ranks[rank]
            reason = waiting.end or "is not debugged any more: the connection to its host broke"
            if waiting.client is not None:
                await waiting.client.send({"type": "end", "reason": reason})
                waiting.client.writer.close()
            self._report("breakpoint_end", f"rank {rank} {reason}", rank=rank)

    async def _list(self, peer: Peer) -> None:
        waiting = [self._ranks[rank] for rank in sorted(self._ranks)]
        ranks = [{**entry.rank.greeting, "attached": entry.client is not None} for entry in waiting]
        await peer.send({"type": "breakpoints", "ranks": ranks})

    async def _serve_client(self, peer: Peer) -> None:
        rank = peer.greeting.get("rank")
        waiting = self._ranks.get(rank) if type(rank) is int else None
        if waiting is None:
            raise RendezvousError(f"rank {rank!r:.20} waits in no breakpoint")
        if waiting.client is not None:
            raise RendezvousError(f"rank {rank} is being debugged by another client")
        waiting.client = peer
        self._report("debugger", f"a debugger is attached to rank {rank}", rank=rank)
        end = "goes on: the connection of its debugger broke"
        try:
            place = {name: waiting.rank.greeting.get(name) for name in ("file", "line", "function")}
            await peer.send({"type": "attached", **place})
            await waiting.rank.send({**peer.greeting, "type": "attach"})
            while message := await peer.receive():
                if message.get("type") == "detach":
                    end = "goes on: its debugger was detached"
                    break
                await waiting.rank.send(message)
        finally:
            waiting.end = waiting.end or end
            waiting.rank.writer.close()
            with contextlib.suppress(OSError):
                await peer.writer.wait_closed()
