# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Send all hosts the record of the job, with which another one goes on when the leader is lost (see ``succession``)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from torchx_monarch.controller import succession
from torchx_monarch.controller.pacing import Paced
from torchx_monarch.controller.quorum import Quorum
from torchx_monarch.model.job_record import AttemptProgress, JobRecord
from torchx_monarch.model.registration import Registration
from torchx_monarch.model.session_record import SessionRecord
from torchx_monarch.transport import messages

_SEND_TIMEOUT = 1.0
"""Seconds to send the record to all hosts: one that does not read must not delay the others."""

_RESEND_AFTER = 0.05
"""Seconds between two records about changes of the hosts or runs: thousands of hosts may come or go together."""


class RecordPublisher:
    """Keep the hosts informed, if one of them takes over when the leader is lost; else do nothing.

    Attributes:
        enabled: whether another host takes over when this one is lost.
        generation: number of the newest record that made the present hosts the voters, over all leaders; -1 for none.

    Args:
        leader: replica of the leader, which is this host.
        term: its term.
        others: returns the other hosts that can take part, in the order in which they take over.
        writers: the connections to the other hosts, by replica.
        enabled: see above.
        quorum: the voters; None if all hosts are on one machine.
        before: the job, as the leader before this one has left it; None on replica 0.
    """

    def __init__(
        self,
        leader: int,
        term: int,
        others: Callable[[], Collection[Registration]],
        writers: Mapping[int, asyncio.StreamWriter],
        enabled: bool,
        quorum: Quorum | None = None,
        before: JobRecord | None = None,
    ) -> None:
        self.enabled = enabled
        self.generation = before.generation if before is not None else -1
        self._leader = leader
        self._term = term
        self._others = others
        self._writers = writers
        self._quorum = quorum
        self._attempt: tuple[tuple[int, ...], AttemptProgress] | None = None
        self._session = before.session if before is not None else None
        self._tasks: set[asyncio.Task[bool]] = set()  # the event loop holds tasks by weak references only
        self.send_soon = Paced(self._send, _RESEND_AFTER)

    @property
    def has_begun(self) -> bool:
        """Whether the hosts know the job under this leader, so that another one can go on with it."""
        return self.enabled and self._attempt is not None

    async def publish(self, places: tuple[int, ...], progress: AttemptProgress) -> None:
        """Make the registered hosts the voters, and tell all hosts the state of the job.

        Args:
            places: replicas of the attempt, in the order of their node ranks.
            progress: the progress of the attempts.
        """
        self._attempt = places, progress
        self.generation += 1
        if self._quorum is not None:
            self._quorum.begin({self._leader, *(host.replica for host in self._others())})
        await self.send()

    def set_session(self, session: SessionRecord) -> None:
        """Tell all hosts soon that the runs of a live allocation have changed."""
        self._session = session
        self.send_soon()

    async def send(self) -> None:
        """Tell all hosts the present state of the job."""
        if sending := self._send():
            await asyncio.wait(sending, timeout=_SEND_TIMEOUT)

    def _send(self) -> list[asyncio.Task[bool]]:
        """Send the record; return the tasks that do so."""
        if self._attempt is None or not self.enabled:
            return []
        places, progress = self._attempt
        others = [host for host in self._others() if host.replica in self._writers]
        hosts = tuple(host.replica for host in others)
        if self._quorum is not None and not set(hosts) <= set(self._quorum.voters):
            self.generation += 1
            self._quorum.begin({*self._quorum.voters, *hosts})
        listeners = tuple(host.listener for host in others[: succession.SUCCESSORS]) if self._quorum else ()
        voters = self._quorum.voters if self._quorum else ()
        record = JobRecord(
            self._term, self._leader, hosts, places, progress, listeners, voters, self.generation, self._session
        )
        data = messages.encode({"type": "job", "job": record.to_json()})  # once for thousands of hosts
        sending = [asyncio.ensure_future(messages.send_bytes(writer, data)) for writer in self._writers.values()]
        for task in sending:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return sending
