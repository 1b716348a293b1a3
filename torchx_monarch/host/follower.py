# SPDX-License-Identifier: BSD-3-Clause
"""A host other than replica 0: registered with replica 0, or looking for it, until it learns the job's result."""

from __future__ import annotations

import dataclasses
import functools
import signal
import time

from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.rendezvous import RendezvousError
from torchx_monarch.controller.rendezvous_client import RendezvousClient
from torchx_monarch.host.host import Host
from torchx_monarch.host.workload import Workload
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.transport.connections import ConnectError

_ERROR_REPORT_TIMEOUT = 10.0
"""Seconds for which a host that cannot take part tries to report its error to replica 0."""


async def follow(
    host: Host, workload: Workload, registration: Registration, network: HostNetwork, join_timeout: float
) -> JobResult:
    """Take part in the job of replica 0's controller; return the job's result, or the reason for not knowing it.

    If replica 0 is lost and the backend replaces it, stop the ranks and register with the new one.
    """
    # A host with an error only reports it. If replica 0 has the same error, it has already exited.
    timeout = min(join_timeout, _ERROR_REPORT_TIMEOUT) if registration.error else join_timeout
    try:
        client = await _join(host, network, registration, timeout, "replica 0")
    except RendezvousError as error:
        reason = registration.error or str(error)
        host.reporter.line(f"host {registration.replica}: {reason}")
        return JobResult(registration.code if registration.error else 1, reason)
    while True:
        host.report = client.report
        result = await client.result(workload.handle)
        if result is not None:
            if client.dismissed and not result.stopped:
                host.reporter.line(f"host {registration.replica} was refused: {result.reason}")
            return result
        host.report = None
        lost_replica0 = JobResult(1, client.lost or f"{host.name} lost replica 0", consequence=True, replica=0)
        host.reporter.line(lost_replica0.reason)
        if host.options.replacements == 0 or registration.error:
            return lost_replica0
        pool, attempt = workload.pool, -1
        if pool is not None:
            await pool.stop(signal.SIGTERM, host.grace)
            attempt = pool.attempt
        try:
            again = dataclasses.replace(registration, attempt=attempt)
            client = await _join(host, network, again, host.options.rejoin_timeout, "another replica 0")
        except RendezvousError as error:
            host.reporter.line(f"host {registration.replica}: {error}")
            return lost_replica0


async def _join(
    host: Host, network: HostNetwork, registration: Registration, timeout: float, whom: str
) -> RendezvousClient:
    failure, roles = "", host.roles

    def failed(error: ConnectError) -> None:
        nonlocal failure
        failure = f" ({error})"

    async def joining() -> RendezvousClient:
        until, there = time.monotonic() + timeout, network
        if roles is not None and roles.looks_up:
            where = await roles.find(host.options.role, network, timeout, failed)
            there = dataclasses.replace(network, rendezvous=where)
        left = max(1.0, until - time.monotonic())
        host.connector = functools.partial(there.greet, there.rendezvous)
        return await RendezvousClient.join(there, registration, left, failed)

    return await host.reporter.while_waiting(joining(), lambda: whom + failure)
