# SPDX-License-Identifier: BSD-3-Clause
"""What ``MonarchJob`` and ``SPMDJob`` share: a job of a scheduler to whose hosts this process attaches."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from typing import Any

from torchx.runner import Runner, get_runner
from torchx.specs import is_terminal

from torchx_monarch.client.attachment import Attachment, client
from torchx_monarch.client.hosts import Hosts, say
from torchx_monarch.monarch_adapter import monarch_api

monarch_api.prepare_import()

from monarch.job import JobTrait  # noqa: E402

_log = logging.getLogger("torchx_monarch")

CACHE = ".monarch/job_state.pkl"
"""File in which Monarch caches a job's state. A script started by ``apply(client_script=...)`` reads it there."""

_ASK_EVERY = 1.0
"""Longest pause between two status requests for a job that ends, in seconds; the first pauses are shorter."""

_END_TIMEOUT = 15.0
"""Seconds that ``kill`` waits for the end of the hosts."""

_UNMOUNT_TIMEOUT = 15.0
"""Seconds for which ``kill`` retries to remove busy mounts: a closed file keeps its mount busy for a moment."""


class AttachedJob(JobTrait):  # type: ignore[misc]
    """Attach this process, as a Monarch client, to the hosts of an app.

    Attributes:
        handle: the app's TorchX handle; None before ``apply``.

    Args:
        start_timeout: seconds that ``state`` waits for the hosts; None for no limit.
        out_of_cluster: whether all connections go through replica 0 of the first role.
    """

    handle: str | None

    def __init__(self, start_timeout: float | None = None, out_of_cluster: bool = False) -> None:
        super().__init__()
        self._start_timeout = start_timeout
        self._out_of_cluster = out_of_cluster
        self._attachments: dict[str, Attachment] = {}
        self._attached_meshes: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        # Sockets cannot be pickled, nor the runner.
        state = {**self.__dict__, "_attachments": {}, "_attached_meshes": []}
        state.pop("_runner", None)
        return state

    def kill(self) -> None:
        """End the job and remove its mounts.

        Raises:
            RuntimeError: a mount stays busy. The job continues, and ``kill`` can be called again.
        """
        until = time.monotonic() + _UNMOUNT_TIMEOUT
        while True:
            try:
                super().kill()
                return
            except RuntimeError:
                if time.monotonic() > until:
                    raise
            time.sleep(_ASK_EVERY / 4)

    # -- private hooks of Monarch 0.7's JobTrait -----------------------------------------------------------------------

    def _is_running(self) -> bool:
        status = self._runner.status(self.handle) if self.handle else None
        return status is not None and not is_terminal(status.state)

    def _connect_host_meshes(self, running_job: JobTrait) -> dict[str, Any]:
        # super() starts Monarch's sidecar process for mounts and telemetry, which reaches the hosts the same way as
        # this process: attach first.
        if isinstance(running_job, AttachedJob):
            running_job._attach()
        meshes: dict[str, Any] = super()._connect_host_meshes(running_job)
        return meshes

    def _cleanup_log_context(self) -> dict[str, Any]:
        return {"job_type": type(self).__name__, "handle": self.handle}

    def _rebind_connection_inputs(self, spec: JobTrait) -> None:
        if isinstance(spec, AttachedJob):
            self._start_timeout = spec._start_timeout
            self._out_of_cluster = spec._out_of_cluster

    def _requires_sidecar_gateway(self) -> bool:
        return self._out_of_cluster and not self._is_on_one_machine

    def _prepare_client_gateway(self) -> None:
        self._attach()

    def _should_spawn_telemetry_worker_collector_actors(self) -> bool:
        return not self._is_on_one_machine  # where one collector for each host is of no use

    # -- helpers -------------------------------------------------------------------------------------------------------

    @property
    def _is_on_one_machine(self) -> bool:
        return (self.handle or "").startswith("monarch_local://")

    @functools.cached_property
    def _runner(self) -> Runner:
        return get_runner()

    def _roles(self) -> list[str]:
        """Return the names of the roles to whose hosts to attach."""
        raise NotImplementedError

    def _hosts_of(self, role: str) -> Hosts:
        """Return the hosts of a role."""
        assert self.handle is not None
        return Hosts(self.handle, role, runner=self._runner)

    def _meshes(self) -> dict[str, Any]:
        """Attach to the hosts of every role; return a HostMesh for each, by role."""
        meshes = {role: monarch_api.host_mesh(role, found.addresses) for role, found in self._attach().items()}
        self._attached_meshes += meshes.values()
        return meshes

    def _wait_for_end(self) -> None:
        until, pause = time.monotonic() + _END_TIMEOUT, 0.05
        while self._is_running() and time.monotonic() < until:
            time.sleep(pause)
            pause = min(2 * pause, _ASK_EVERY)

    def _attach(self) -> dict[str, Attachment]:
        """Register this process as a Monarch client of the hosts of every role; return the connections by role."""
        deadline = None if self._start_timeout is None else time.monotonic() + self._start_timeout
        found = {role: self._attach_to(role, deadline) for role in self._roles()}
        first = next(iter(found.values()))
        gateway = first.addresses[0] if self._out_of_cluster and first.address.networked else ""
        for attachment in found.values():
            assert self.handle is not None
            url, tls = client.join(self.handle, attachment)
            monarch_api.become_client(url, tls, lambda text: _log.warning("INSECURE: %s", text), gateway)
        return found

    def _detach(self) -> None:
        """Stop this process's meshes if the hosts are still connected, then close all connections."""
        is_attached = any(attachment.is_open for attachment in self._attachments.values())
        for mesh in self._attached_meshes if is_attached else ():
            with contextlib.suppress(Exception):
                monarch_api.stop_mesh(mesh)
        self._attached_meshes.clear()
        for attachment in self._attachments.values():
            attachment.link.close()
        self._attachments.clear()

    def _attach_to(self, role: str, deadline: float | None) -> Attachment:
        before = self._attachments.get(role)
        if before is not None and before.is_open and not before.stale:
            return before
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        whose = f"{self.handle}/{role}".rstrip("/")
        attachment = self._hosts_of(role).wait_for(lambda target: Attachment.open(target, whose), timeout, say)
        if before is not None:
            before.link.close()
        self._attachments[role] = attachment
        return attachment
