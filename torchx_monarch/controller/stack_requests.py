# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Answer clients that ask replica 0 for the stacks of the ranks: the greeting ``stacks``.

Its fields are ``rank``, the only global rank that is asked (null for all), and ``native``. The answer is a message of
type ``stacks`` for each host, with the field ``stacks``, a list of ``insight.stacks.ProcessStacks``; and then one of
type ``end``, whose ``missing`` has the hosts that have not answered: an object from replica to reason.
"""

from __future__ import annotations

import asyncio
import dataclasses

from torchx_monarch.controller.agents import Agents
from torchx_monarch.controller.host_messages import TakeStacks
from torchx_monarch.controller.rendezvous import RendezvousError
from torchx_monarch.transport import messages

_TIMEOUT = 8.0
"""Seconds for the answers of all hosts."""

_NATIVE_TIMEOUT = 30.0
"""The same where py-spy reads the stacks."""


class StackRequests:
    """Ask the hosts of a role for the stacks of their ranks.

    Args:
        agents: the agents of the hosts.
    """

    def __init__(self, agents: Agents) -> None:
        self._agents = agents

    async def serve(
        self, greeting: messages.Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer a greeting (see ``Rendezvous.clients``)."""
        rank, native = greeting.get("rank"), greeting.get("native") is True
        if rank is not None and type(rank) is not int:
            raise RendezvousError(f"rank={rank!r:.20} is no number")
        if not self._agents.hosts:
            raise RendezvousError("there are no ranks yet: the hosts are not together")
        request = TakeStacks(rank, native)
        answers, missing = await self._agents.collect(request, _NATIVE_TIMEOUT if native else _TIMEOUT)
        for answer in answers:
            stacks = [dataclasses.asdict(one) for one in answer.stacks]
            await messages.send(writer, {"type": "stacks", "replica": answer.replica, "stacks": stacks})
        await messages.send(writer, {"type": "end", "missing": {str(one): why for one, why in missing.items()}})
