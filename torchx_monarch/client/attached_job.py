# SPDX-License-Identifier: BSD-3-Clause
"""What ``MonarchJob`` and ``SPMDJob`` share: a job of a scheduler to whose hosts this process attaches."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from typing import Any

from torchx.runner import Runner, get_runner
from torchx.specs import NONE, AppState, AppStatus, is_terminal

from torchx_monarch.client.attachment import Attachment, client
from torchx_monarch.client.target import Target
from torchx_monarch.exceptions import AllocationError, UnreachableError
from torchx_monarch.monarch_adapter import monarch_api
from torchx_monarch.monarch_adapter.job_trait import SchedulerJob

# After the adapter, which prepares this import.
from monarch.job import JobTrait  # isort: skip

_log = logging.getLogger("torchx_monarch")

_ASK_EVERY = 1.0
"""Longest pause between two status requests for a job, in seconds; the first pauses are shorter."""

_ASK_QUEUE_EVERY = 5.0
"""Longest pause in seconds while a job is pending: all users of a cluster share its scheduler."""

_SAY_EVERY = 30.0
"""Seconds between two log lines about the reason for waiting."""

_END_TIMEOUT = 15.0
"""Seconds that ``kill`` waits for the end of the hosts."""

_UNMOUNT_TIMEOUT = 15.0
"""Seconds for which ``kill`` retries to remove busy mounts: a closed file keeps its mount busy for a moment."""


class AttachedJob(SchedulerJob):
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

    # -- hooks of SchedulerJob -----------------------------------------------------------------------------------------

    def _attach_first(self, active: JobTrait) -> None:
        if isinstance(active, AttachedJob):
            active._attach()

    def _lives(self) -> bool:
        status = self._status_of_app()
        return status is not None and not is_terminal(status.state)

    def _identity(self) -> dict[str, Any]:
        return {"handle": self.handle}

    def _adopt(self, spec: JobTrait) -> None:
        if isinstance(spec, AttachedJob):
            self._start_timeout = spec._start_timeout
            self._out_of_cluster = spec._out_of_cluster

    def _sidecar_goes_through_client(self) -> bool:
        return self._out_of_cluster and not self._on_one_machine()

    def _on_one_machine(self) -> bool:
        return (self.handle or "").startswith("monarch_local://")

    # -- helpers -------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _runner(self) -> Runner:
        return get_runner()

    def _roles(self) -> list[str]:
        """Return the names of the roles to whose hosts to attach."""
        raise NotImplementedError

    def _target(self, role: str) -> Target:
        """Return where replica 0 of a role listens."""
        assert self.handle is not None
        return Target.from_handle(self.handle, role, runner=self._runner)

    def _status_of_app(self) -> AppStatus | None:
        return self._runner.status(self.handle) if self.handle else None

    def _meshes(self) -> dict[str, Any]:
        """Attach to the hosts of every role; return a HostMesh for each, by role."""
        meshes = {role: monarch_api.host_mesh(role, found.addresses) for role, found in self._attach().items()}
        self._attached_meshes += meshes.values()
        return meshes

    def _wait_for_end(self) -> None:
        until, pause = time.monotonic() + _END_TIMEOUT, 0.05
        while self._lives() and time.monotonic() < until:
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
        pause, say = 0.05, time.monotonic() + _SAY_EVERY
        while True:
            status = self._status_of_app()
            if status is None or is_terminal(status.state):
                self._detach()
                raise AllocationError(f"the job {self.handle} is no longer active: {_in_words(status)}")
            try:
                attachment = Attachment.open(self._target(role), f"{self.handle}/{role}".rstrip("/"))
                if before is not None:
                    before.link.close()
                self._attachments[role] = attachment
                return attachment
            except UnreachableError as error:
                if error.final:
                    raise
                if deadline is not None and time.monotonic() > deadline:
                    waited = f"{self._start_timeout:g} s (start_timeout)"
                    raise AllocationError(f"{self.handle} is {status.state.name} after {waited}: {error}") from None
                if time.monotonic() > say:
                    _log.warning("%s is %s; waiting for the hosts of %s: %s", self.handle, status.state, role, error)
                    say = time.monotonic() + _SAY_EVERY
            time.sleep(pause)
            pause = min(2 * pause, _ASK_QUEUE_EVERY if status.state is AppState.PENDING else _ASK_EVERY)


def _in_words(status: AppStatus | None) -> str:
    if status is None:
        return "its scheduler does not know it"
    said = " ".join(text for text in (status.msg, status.structured_error_msg) if text and text != NONE)
    return f"{status.state.name} {said}".strip()
