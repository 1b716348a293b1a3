# SPDX-License-Identifier: BSD-3-Clause
"""How a host other than replica 0 takes part in a job: it registers with replica 0 and executes its requests."""

from __future__ import annotations

import dataclasses
import signal
from typing import TYPE_CHECKING

from torchx_monarch.controller.host_network import HostNetwork, RendezvousError
from torchx_monarch.controller.rendezvous_client import RendezvousClient
from torchx_monarch.host.host import Host
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.transport.connections import ConnectError

if TYPE_CHECKING:
    from torchx_monarch.host.workload import Workload

_ERROR_REPORT_TIMEOUT = 10.0
"""Seconds for which a host that cannot take part tries to report its error to replica 0."""


class Follower:
    """Take part in the job of replica 0's controller.

    If replica 0 is lost and the backend replaces it, the host stops its processes and registers with the new one.
    """

    def __init__(self, host: Host, workload: Workload, network: HostNetwork) -> None:
        self._host = host
        self._workload = workload
        self._network = network

    async def run(self, registration: Registration) -> JobResult:
        """Take part until the job ends; return its result, or the reason for not knowing it."""
        host, lost = self._host, None
        while True:
            client = await self._meet(registration, lost)
            if isinstance(client, JobResult):
                return client
            host.report = client.report
            result = await client.result(self._workload.handle)
            if result is not None:
                if client.dismissed and not result.stopped:
                    host.reporter.line(f"host {registration.replica} was refused: {result.reason}")
                return result
            host.report = None
            lost = JobResult(1, client.lost, consequence=True, replica=0)
            host.reporter.line(lost.reason)
            if host.options.replacements == 0 or registration.error:
                return lost
            registration = await self._after_loss(registration)

    async def _meet(self, registration: Registration, lost: JobResult | None) -> RendezvousClient | JobResult:
        """Register with replica 0, or with another one after a loss; return the result if there is none."""
        # A host with an error only reports it. If replica 0 has the same error, it has already exited.
        timeout = self._host.options.rejoin_timeout if lost else self._workload.sizes.join_timeout
        timeout = min(timeout, _ERROR_REPORT_TIMEOUT) if registration.error else timeout
        try:
            return await self._join(registration, timeout, "another replica 0" if lost else "replica 0")
        except RendezvousError as error:
            reason = registration.error or str(error)
            self._host.reporter.line(f"host {registration.replica}: {reason}")
            return lost or JobResult(registration.code if registration.error else 1, reason)

    async def _after_loss(self, registration: Registration) -> Registration:
        """Stop what runs; return the registration with another replica 0."""
        await self._workload.stop(signal.SIGTERM)
        pool = self._workload.pool
        if pool is None:
            return registration
        return dataclasses.replace(registration, error=pool.remains, world=pool.world or registration.world)

    async def _join(self, registration: Registration, timeout: float, whom: str) -> RendezvousClient:
        failure = ""

        def failed(error: ConnectError) -> None:
            nonlocal failure
            failure = f" ({error})"

        joining = RendezvousClient.join(self._network, registration, timeout, failed)
        return await self._host.reporter.while_waiting(joining, lambda: whom + failure)
