# SPDX-License-Identifier: BSD-3-Clause
"""Ask all hosts for the stacks and samples of their ranks: for clients, and to record what ranks use.

The greeting ``stacks`` of a client has the fields ``rank``, the only global rank that is asked (null for all), and
``native``; the greeting ``samples`` has none. The answer is a message of the greeting's type for each host, with a list
in the field of that name: of ``insight.stacks.ProcessStacks`` or ``insight.rank_sample.RankSample``. The last message
is of type ``end``, and its ``missing`` has the hosts that have not answered: an object from replica to reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from torchx_monarch.controller.host_messages import Request, SampleRanks, TakeStacks
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.controller.rendezvous import Peer, RendezvousError
from torchx_monarch.insight.sample_log import SampleLog

_TIMEOUT = 8.0
"""Seconds for the answers of all hosts."""

_NATIVE_TIMEOUT = 30.0
"""The same where py-spy reads the stacks."""

_EVERY = 5.0
"""Seconds between two samples."""

_PER_HOST = 0.25
"""Seconds between two samples for each host of a large job: replica 0 receives the samples of all."""

_SAMPLE_TIMEOUT = 5.0
"""Seconds for the answers of all hosts; those of others are left out."""


class HostQueries:
    """Ask the hosts of a role on behalf of clients, whose greetings it answers (see ``Rendezvous.clients``)."""

    def __init__(self, hosts: JobHosts) -> None:
        self._hosts = hosts

    async def stacks(self, peer: Peer) -> None:
        rank, native = peer.greeting.get("rank"), peer.greeting.get("native") is True
        if rank is not None and type(rank) is not int:
            raise RendezvousError(f"rank={rank!r:.20} is no number")
        await self._answer("stacks", TakeStacks(rank, native), _NATIVE_TIMEOUT if native else _TIMEOUT, peer)

    async def samples(self, peer: Peer) -> None:
        await self._answer("samples", SampleRanks(), _TIMEOUT, peer)

    async def _answer(self, kind: str, request: Request[Any], timeout: float, peer: Peer) -> None:
        if not self._hosts.present:
            raise RendezvousError("there are no ranks yet: the hosts are not together")
        answers, missing = await self._hosts.collect(request, timeout)
        for replica, found in answers.items():
            await peer.send({"type": kind, "replica": replica, kind: found})
        await peer.send({"type": "end", "missing": {str(replica): why for replica, why in missing.items()}})


@contextlib.contextmanager
def recording_samples(hosts: JobHosts, log: SampleLog | None, every: float = _EVERY) -> Iterator[None]:
    """Record samples of the ranks within this context, ``every`` so many seconds; nothing without a log."""

    async def record(log: SampleLog) -> None:
        while True:
            await asyncio.sleep(max(every, _PER_HOST * len(hosts.present)))
            answers, _ = await hosts.collect(SampleRanks(groups=False), _SAMPLE_TIMEOUT)
            log.append(itertools.chain.from_iterable(answers.values()))

    task = asyncio.ensure_future(record(log)) if log is not None else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
