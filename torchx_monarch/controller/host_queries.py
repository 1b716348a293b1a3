# SPDX-License-Identifier: BSD-3-Clause
"""Answer clients that ask replica 0 for something that all hosts know: stacks and samples of their ranks.

The greeting ``stacks`` has the fields ``rank``, the only global rank that is asked (null for all), and ``native``; the
greeting ``samples`` has none. The answer is a message of the greeting's type for each host, with a list in the field of
that name: of ``insight.stacks.ProcessStacks`` or ``insight.rank_sample.RankSample``. The last message is of type
``end``, and its ``missing`` has the hosts that have not answered: an object from replica to reason.
"""

from __future__ import annotations

import asyncio
import dataclasses

from torchx_monarch.controller.host_messages import Request, SampleRanks, TakeStacks
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.controller.rendezvous import RendezvousError
from torchx_monarch.transport import messages

_TIMEOUT = 8.0
"""Seconds for the answers of all hosts."""

_NATIVE_TIMEOUT = 30.0
"""The same where py-spy reads the stacks."""


class HostQueries:
    """Ask the hosts of a role on behalf of clients.

    Args:
        hosts: the hosts, which are asked.
    """

    def __init__(self, hosts: JobHosts) -> None:
        self._hosts = hosts

    async def stacks(
        self, greeting: messages.Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer the greeting ``stacks`` (see ``Rendezvous.clients``)."""
        rank, native = greeting.get("rank"), greeting.get("native") is True
        if rank is not None and type(rank) is not int:
            raise RendezvousError(f"rank={rank!r:.20} is no number")
        await self._answer("stacks", TakeStacks(rank, native), _NATIVE_TIMEOUT if native else _TIMEOUT, writer)

    async def samples(
        self, greeting: messages.Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer the greeting ``samples`` (see ``Rendezvous.clients``)."""
        await self._answer("samples", SampleRanks(), _TIMEOUT, writer)

    async def _answer(self, kind: str, request: Request, timeout: float, writer: asyncio.StreamWriter) -> None:
        if not self._hosts.present:
            raise RendezvousError("there are no ranks yet: the hosts are not together")
        answers, missing = await self._hosts.collect(request, timeout)
        for answer in answers:
            found = [dataclasses.asdict(record) for record in getattr(answer, kind)]
            await messages.send(writer, {"type": kind, "replica": answer.replica, kind: found})
        await messages.send(writer, {"type": "end", "missing": {str(replica): why for replica, why in missing.items()}})
