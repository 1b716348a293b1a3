# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A host other than replica 0: registered with replica 0, or looking for it, until it learns the job's result."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import time
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from torchx_monarch.controller import quorum, succession
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.rendezvous import RendezvousError
from torchx_monarch.controller.rendezvous_client import RendezvousClient
from torchx_monarch.host.ranks.breakpoints import Streams
from torchx_monarch.host.spmd_workload import SpmdWorkload
from torchx_monarch.host.workload import Host
from torchx_monarch.model.job_record import JobRecord
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.model.registration import Registration
from torchx_monarch.transport import connections, messages
from torchx_monarch.transport.connections import Address, ConnectError

_SUCCESSOR_TIMEOUT = 5.0
"""Seconds for the next leader to listen, once it knows that the last one is lost."""

_ERROR_REPORT_TIMEOUT = 10.0
"""Seconds for which a host that cannot take part tries to report its error to replica 0."""


Lead: TypeAlias = Callable[[JobRecord, int, Awaitable[None]], Awaitable[JobResult]]


class Follower:
    """Take part in the job of another host's controller.

    Attributes:
        ended: the result with which this host ends once the leader is lost, instead of following another, because it is
            preempted; None if it goes on.

    Args:
        host: the host.
        workload: what it runs.
        registration: the data with which it registers.
        network: its connections.
        fewest: minimum number of hosts that the job needs.
        lead: takes over the job as leader: called with its record, this host's term, and the task that ends the ranks.
    """

    def __init__(
        self,
        host: Host,
        workload: SpmdWorkload,
        registration: Registration,
        network: HostNetwork,
        fewest: int,
        lead: Lead,
    ) -> None:
        self.ended: JobResult | None = None
        self._host = host
        self._workload = workload
        self._registration = registration
        self._network = network
        self._fewest = fewest
        self._lead = lead
        self._term = 0
        self._generation = -1

    async def run(self, join_timeout: float) -> JobResult:
        """Register with replica 0 and return the job's result, or the reason for not knowing it.

        Args:
            join_timeout: seconds for replica 0 to answer.
        """
        host, registration = self._host, self._registration
        # A host with an error only reports it. If replica 0 has the same error, it has already exited.
        timeout = min(join_timeout, _ERROR_REPORT_TIMEOUT) if registration.error else join_timeout
        try:
            client = await self._join(registration, timeout, "replica 0")
        except RendezvousError as error:
            reason = registration.error or str(error)
            host.reporter.line(f"host {registration.replica}: {reason}")
            return JobResult(registration.code if registration.error else 1, reason)
        while True:
            host.report = client.report
            result = await client.result(self._workload.handle)
            if result is not None:
                if client.dismissed and not result.stopped:
                    host.reporter.line(f"host {registration.replica} was refused: {result.reason}")
                return result
            host.report = None
            if client.job is not None:
                self._term = max(self._term, client.job.term)
                self._generation = client.job.generation
            this = f"host {registration.replica} ({host.hostname})"
            leader = client.job.leader if client.job is not None else 0
            lost_leader = JobResult(1, client.lost or f"{this} lost replica {leader}", consequence=True, replica=leader)
            result = self.ended or lost_leader
            host.reporter.line(result.reason)
            rejoins = host.options.replacements > 0 and not registration.error
            job, able = client.job, not client.paused and not self.ended
            if job is not None and able and succession.suffice(job, self._fewest):
                successor = await self._succeed(job, client, lost_leader)
                if isinstance(successor, JobResult):
                    return successor
                if successor is not None:
                    client = successor
                    continue
            if self.ended or not rejoins:
                return result
            pool, attempt = self._workload.runs.pool, -1
            if pool is not None:
                await pool.stop(signal.SIGTERM, host.grace)
                attempt = pool.attempt
            try:
                again = dataclasses.replace(registration, attempt=attempt)
                client = await self._join(again, host.options.rejoin_timeout, "another replica 0")
            except RendezvousError as error:
                host.reporter.line(f"host {registration.replica}: {error}")
                return result

    async def _succeed(
        self, job: JobRecord, lost: RendezvousClient, result: JobResult
    ) -> RendezvousClient | JobResult | None:
        """Follow the next leader, or become it; return None if no host could take over.

        Args:
            job: the job's record.
            lost: the connection to the lost leader.
            result: the result without a new leader.

        Returns:
            The connection to the new leader, or the result: that of the job under this host as leader, or the given one
            with the reason for which no host may take over.
        """
        host, pool = self._host, self._workload.runs.pool
        ending = asyncio.ensure_future(pool.stop(signal.SIGTERM, host.grace) if pool is not None else asyncio.sleep(0))
        if job.voters and await lost.leader_has_ended():
            job = succession.without_leader(job)
        if reason := quorum.why_not(job.hosts, job.voters, new=True):
            await ending
            return dataclasses.replace(result, reason=f"{result.reason}; no other host takes over: {reason}")
        # Hosts notice the silence of a leader at different times, up to a heartbeat apart.
        patience = _SUCCESSOR_TIMEOUT + host.options.lease / 2
        listeners = succession.listeners(job)
        for replica, term in succession.successors(job):
            if replica == self._registration.replica:
                return await self._lead(job, term, ending)
            await ending
            again = dataclasses.replace(self._registration, attempt=pool.attempt if pool is not None else -1)
            where = succession.listener_of(self._network.rendezvous, term, listeners.get(replica, ""))
            try:
                client = await self._join(again, patience, f"host {replica}, which takes over", where)
            except RendezvousError as error:
                host.reporter.line(f"host {self._registration.replica}: {error}")
                patience = 2 * _SUCCESSOR_TIMEOUT + host.grace  # the next one may still be ending its ranks
                continue
            self._term = term
            return client
        return None

    async def _join(
        self, registration: Registration, timeout: float, whom: str, listener: Address | None = None
    ) -> RendezvousClient:
        failure, roles, network = "", self._host.roles, self._network
        peer_timeout, lease = network.options.peer_timeout, self._host.options.lease

        def failed(error: ConnectError) -> None:
            nonlocal failure
            failure = f" ({error})"

        async def joining() -> RendezvousClient:
            until, where = time.monotonic() + timeout, listener or network.rendezvous
            if roles is not None and roles.looks_up:
                where = await roles.find(self._host.options.role, network, timeout, failed)
            left = max(1.0, until - time.monotonic())

            async def connect(greeting: messages.Message) -> Streams:
                reader, writer = await connections.connect(where, network.identity, peer_timeout)
                await messages.send(writer, {**greeting, "version": messages.VERSION})
                return reader, writer

            self._host.connector = connect
            return await RendezvousClient.join(
                where, registration, left, network.identity, peer_timeout, failed, lease, self._term, self._generation
            )

        return await self._host.reporter.while_waiting(joining(), lambda: whom + failure)
