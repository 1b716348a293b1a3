# SPDX-License-Identifier: BSD-3-Clause
"""What clients ask of replica 0: the events of its role; stacks, profiles and samples of ranks; a debugger.

The greeting ``stacks`` of a client has the field ``rank``, the only global rank that is asked (null for all);
the greeting ``profile`` has those of ``ProfileRanks``; the greetings ``samples`` and ``events`` have none. The answer
consists of messages of the greeting's type, with a field of that name: ``RankSamples.to_text`` of a host, a list of its
``RankProfile``, or a list with one of the ``SharedStacks`` of all hosts, or of the events. The last message is of type
``end``, and its ``missing`` has the hosts that have not answered: an object from replica to reason.

For each rank in a breakpoint, its host has a connection to replica 0, and passes it on to the rank; replica 0 passes
messages on between it and that of a client. Whichever ends first, the other one is closed.

=========================  =======================================================================================
rank to replica 0          ``breakpoint`` (greeting: ``rank``, ``pid``, ``file``, ``line``, ``function``, and ``wait``,
                           the seconds for which it waits), ``output`` (``data``), ``end`` (``reason``)
client to replica 0        ``breakpoints`` (greeting; the answer has ``ranks``, a list of greetings of ranks with
                           ``attached``), ``debug`` (greeting: ``rank``, ``kind`` of terminal, ``rows``, ``columns``),
                           ``input`` (``data``), ``detach``
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
import itertools
import os
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

from torchx_monarch.controller.host_messages import AnswerT, ProfileRanks, Request, SampleRanks, TakeStacks
from torchx_monarch.controller.host_network import OfRank, Peer, RendezvousError, Serve
from torchx_monarch.controller.hosts import Answers, JobHosts
from torchx_monarch.insight.profile import MAX_SECONDS
from torchx_monarch.insight.stacks import shared_stacks
from torchx_monarch.model.codec import decode
from torchx_monarch.system.untrusted_text import one_line
from torchx_monarch.transport import messages

_PY_SPY_TIMEOUT = 30.0
"""Seconds for the answers of all hosts with a profile, in addition to its time."""


class HostQueries:
    """Ask the hosts of a role on behalf of clients, whose greetings it answers (see ``HostNetwork.handlers``)."""

    def __init__(self, hosts: JobHosts) -> None:
        self._hosts = hosts

    async def stacks(self, peer: Peer) -> None:
        rank = decode(OfRank, peer.greeting).rank
        answers = await self._collect(TakeStacks(rank), [] if rank is None else [rank])
        if not answers.encoded:
            for shared in shared_stacks(itertools.chain(*answers.by_replica.values())):
                answers.encoded.append(messages.encode({"type": "stacks", "stacks": [shared]}))
        await _send(peer, answers)

    async def profile(self, peer: Peer) -> None:
        request = decode(ProfileRanks, peer.greeting)
        if not 0 < request.seconds <= MAX_SECONDS:
            raise RendezvousError(f"seconds={request.seconds!r:.20} is not between 1 and {MAX_SECONDS:g}")
        # py-spy ends with its client: nobody else reads what it samples for up to ten minutes.
        await peer.while_connected(self._profile(request, peer))

    async def events(self, peer: Peer) -> None:
        """Send the events of the role, each in a message, and ``end``."""
        for event in await asyncio.to_thread(self._hosts.reporter.read_events):
            with contextlib.suppress(messages.ProtocolError):  # longer than a message may be: a rank has written it
                await peer.send({"type": "events", "events": [event]})
        await peer.send({"type": "end"})

    async def samples(self, peer: Peer) -> None:
        answers = await self._collect(SampleRanks())
        if not answers.encoded:
            answers.encoded.extend(
                messages.encode({"type": "samples", "samples": text}) for text in answers.by_replica.values()
            )
        await _send(peer, answers)

    async def _collect(self, request: Request[AnswerT], ranks: Collection[int] = ()) -> Answers[AnswerT]:
        self._check_ranks()
        return await self._hosts.collect_shared(request, ranks)

    async def _profile(self, request: ProfileRanks, peer: Peer) -> None:
        self._check_ranks()
        profiles, missing = await self._hosts.collect(request, request.seconds + _PY_SPY_TIMEOUT, request.ranks)
        encoded = [messages.encode({"type": "profile", "profile": found}) for found in profiles.values()]
        await _send(peer, Answers(profiles, missing, encoded))

    def _check_ranks(self) -> None:
        if not self._hosts.members.attempt.hosts:
            raise RendezvousError("there are no ranks yet: the hosts are not together")


async def _send(peer: Peer, answers: Answers[Any]) -> None:
    """Send the messages with answers to a client, and ``end``."""
    for message in answers.encoded:
        await messages.send_bytes(peer.writer, message)
    await peer.send({"type": "end", "missing": {str(replica): why for replica, why in answers.missing.items()}})


@dataclasses.dataclass(eq=False)
class _Waiting:
    """A rank in a breakpoint, whose greeting describes it, and the client that is attached."""

    rank: Peer
    client: Peer | None = None
    end: str = ""
    """What has become of the rank; empty if that is not known."""


class DebugSessions:
    """Serve the greetings of ranks and clients (see ``HostNetwork.handlers``).

    Args:
        rest: returns a context within which ranks that wait for others are no hang.
    """

    def __init__(self, hosts: JobHosts, rest: Callable[[], AbstractContextManager[None]]) -> None:
        self.handlers: dict[str, Serve] = {
            "breakpoint": self._serve_rank,
            "breakpoints": self._list,
            "debug": self._serve_client,
        }
        self._command = f"torchx monarch debug {hosts.spec.app} --role {hosts.spec.role}"
        self._report = hosts.reporter.report
        self._rest = rest
        self._ranks: dict[int, _Waiting] = {}

    async def _serve_rank(self, peer: Peer) -> None:
        rank, wait = peer.greeting.get("rank"), peer.greeting.get("wait")
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
