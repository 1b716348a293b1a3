# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A Monarch job on any ``monarch_*`` scheduler. It replaces Monarch's LocalJob, ProcessJob and SlurmJob."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import shlex
import time
from collections.abc import Mapping
from typing import Any

from torchx.specs import NONE, AppDef, AppState, AppStatus, CfgVal, is_terminal

from torchx_monarch.client import this_job
from torchx_monarch.client.attachment import Attachment, HostsNotReadyError, JobConnections, client
from torchx_monarch.command.allocation_spec import IDLE_TIMEOUT
from torchx_monarch.command.meshes import app_of_meshes, check_mesh_name, waiting
from torchx_monarch.exceptions import AllocationError
from torchx_monarch.monarch_adapter import monarch_api
from torchx_monarch.monarch_adapter.job_trait import SchedulerJob
from torchx_monarch.schedulers.monarch import MonarchScheduler
from torchx_monarch.torchx_adapter import torchx_api

# After the adapter, which prepares this import.
from monarch.job import JobState, JobTrait  # isort: skip

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

_CACHE = ".monarch/job_state.pkl"
"""File in which Monarch caches a job's state. A script started by ``apply(client_script=...)`` reads it there."""


class MonarchJob(SchedulerJob):
    """Run a TorchX app as a Monarch job: each role becomes a host mesh, each of its replicas a host.

    The hosts wait for actors; the commands of the roles are not run::

        job = MonarchJob({"trainers": 2, "dataloaders": 1}, scheduler="monarch_slurm")
        procs = job.state().trainers.spawn_procs(per_host={"gpus": 8})
        ...
        job.kill()

    The class implements Monarch's ``JobTrait`` completely: ``apply``, ``state``, ``kill``, ``dump``, ``job_load``,
    ``enable_admin``, ``enable_telemetry``, ``remote_mount``, ``gather_mount``, and the cached state file, which Monarch
    reuses while the job is alive and its arguments are the same.

    Args:
        appdef: the app; or the number of hosts of each mesh by name, such as ``{"trainers": 2, "dataloaders": 1}``, as
            for Monarch's own jobs.
        scheduler: name of a ``monarch_*`` scheduler.
        scheduler_cfg: run options of the scheduler; None for its defaults.
        env: environment variables of all hosts, and thus of their actors; None for no others.
        idle_timeout: seconds without a client after which the hosts end; 0 for never.
        start_timeout: seconds that ``state`` waits for the hosts; None for no limit, because a queue may be long.
        out_of_cluster: whether to route all connections through replica 0 of the first role, for clients that hosts
            cannot dial back (behind NAT or a firewall). Monarch allows one such job in the lifetime of a process.
        workspace: the workspace for ``torchx.runner.Runner.run``; None for no workspace.

    Raises:
        ValueError: the name of a role cannot be an attribute of ``state()``.
    """

    def __init__(
        self,
        appdef: AppDef | Mapping[str, int],
        scheduler: str = "monarch_local",
        scheduler_cfg: Mapping[str, CfgVal] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        idle_timeout: float = IDLE_TIMEOUT,
        start_timeout: float | None = None,
        out_of_cluster: bool = False,
        workspace: str | None = None,
    ) -> None:
        super().__init__()
        self._app = copy.deepcopy(appdef) if isinstance(appdef, AppDef) else app_of_meshes(appdef)
        for role in self._app.roles:
            check_mesh_name(role.name)
            role.env.update(env or {})
        self._scheduler = scheduler
        self._cfg = dict(scheduler_cfg or {})
        self._idle_timeout = idle_timeout
        self._start_timeout = start_timeout
        self._out_of_cluster = out_of_cluster
        self._workspace = workspace
        self._handle: str | None = None
        self._connections = JobConnections()

    @property
    def handle(self) -> str | None:
        """The job's TorchX handle, for ``torchx status`` and ``torchx log``; None before ``apply``."""
        running = self._active_job()
        return running._handle if isinstance(running, MonarchJob) else self._handle

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connections": None}  # sockets cannot be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _connections=JobConnections())

    # -- the abstract methods of JobTrait, and hooks -------------------------------------------------------------------

    def _create(self, client_script: str | None) -> None:
        if self._is_this_job():
            return
        runner = self._connections.runner
        if not isinstance(torchx_api.scheduler_of(runner, self._scheduler), MonarchScheduler):
            raise ValueError(f"scheduler {self._scheduler!r} starts no Monarch hosts: use one of monarch_*")
        words = shlex.split(client_script or "")
        if client_script is not None:
            if not words:
                raise ValueError("client_script is empty: give the script's path, and its arguments")
            if not os.path.basename(words[0]).startswith("python"):
                words = ["python", *words]
            monarch_api.batch_job(self).dump(_CACHE)
        hosts = waiting(self._app, 0.0 if words else self._idle_timeout, words)
        self._handle = runner.run(hosts, self._scheduler, self._cfg, self._workspace)
        _log.info("%s", self._handle)

    def _attach_first(self, active: JobTrait) -> None:
        if isinstance(active, MonarchJob) and not active._is_this_job():
            active._attach()

    def _state(self) -> JobState:
        if self._is_this_job():
            return this_job.this_job().state()
        meshes = {role: monarch_api.host_mesh(role, found.addresses) for role, found in self._attach().items()}
        self._connections.meshes += meshes.values()
        return JobState(meshes)

    def can_run(self, spec: JobTrait) -> bool:
        """Whether this job is alive and has the app, scheduler, run options, idle timeout and workspace of ``spec``."""
        return isinstance(spec, MonarchJob) and spec._spec_key() == self._spec_key() and self._lives()

    def _lives(self) -> bool:
        if self._is_this_job():
            return True
        status = self._status_of_app()
        return status is not None and not is_terminal(status.state)

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

    def _kill(self) -> None:
        if self._is_this_job():
            return  # the host ends the job when this script exits
        self._connections.close()
        if self._handle is None:
            return
        with contextlib.suppress(ValueError):
            self._connections.runner.cancel(self._handle)
        until, pause = time.monotonic() + _END_TIMEOUT, 0.05
        while self._lives() and time.monotonic() < until:
            time.sleep(pause)
            pause = min(2 * pause, _ASK_EVERY)

    def _identity(self) -> dict[str, Any]:
        return {"handle": self._handle}

    def _adopt(self, spec: JobTrait) -> None:
        if isinstance(spec, MonarchJob):
            self._start_timeout = spec._start_timeout
            self._out_of_cluster = spec._out_of_cluster

    def _sidecar_goes_through_client(self) -> bool:
        return self._out_of_cluster and self._scheduler != "monarch_local" and not self._is_this_job()

    def _on_one_machine(self) -> bool:
        return self._scheduler == "monarch_local"

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _spec_key(self) -> tuple[object, ...]:
        return self._app, self._scheduler, self._cfg, self._idle_timeout, self._workspace

    def _is_this_job(self) -> bool:
        """Whether this process is the client script of a job with the same meshes."""
        if not monarch_api.in_batch_job() or not os.environ.get(this_job.VARIABLE):
            return False
        return this_job.this_job().sizes == {role.name: role.num_replicas for role in self._app.roles}

    def _status_of_app(self) -> AppStatus | None:
        return self._connections.runner.status(self._handle) if self._handle else None

    def _attach(self) -> dict[str, Attachment]:
        """Register this process as a Monarch client of the hosts of every role; return the connections by role."""
        deadline = None if self._start_timeout is None else time.monotonic() + self._start_timeout
        found = {role.name: self._attach_to(role.name, deadline) for role in self._app.roles}
        first = found[self._app.roles[0].name]
        gateway = first.addresses[0] if self._out_of_cluster and first.address.networked else ""
        for attachment in found.values():
            assert self._handle is not None
            url, tls = client.join(self._handle, self._connections, attachment)
            monarch_api.become_client(url, tls, lambda text: _log.warning("INSECURE: %s", text), gateway)
        return found

    def _attach_to(self, role: str, deadline: float | None) -> Attachment:
        if (open_one := self._connections.attachment(role)) is not None:
            return open_one
        assert self._handle is not None
        pause, say = 0.05, time.monotonic() + _SAY_EVERY
        while True:
            status = self._status_of_app()
            if status is None or is_terminal(status.state):
                self._connections.close()
                raise AllocationError(f"the job {self._handle} is no longer active: {_in_words(status)}")
            try:
                attachment = Attachment.open(self._handle, role, self._connections.runner)
                self._connections.keep(role, attachment)
                return attachment
            except HostsNotReadyError as error:
                if deadline is not None and time.monotonic() > deadline:
                    waited = f"{self._start_timeout:g} s (start_timeout)"
                    raise AllocationError(f"{self._handle} is {status.state.name} after {waited}: {error}") from None
                if time.monotonic() > say:
                    _log.warning("%s is %s; waiting for the hosts of %s: %s", self._handle, status.state, role, error)
                    say = time.monotonic() + _SAY_EVERY
            time.sleep(pause)
            pause = min(2 * pause, _ASK_QUEUE_EVERY if status.state is AppState.PENDING else _ASK_EVERY)


def _in_words(status: AppStatus | None) -> str:
    if status is None:
        return "its scheduler does not know it"
    said = " ".join(text for text in (status.msg, status.structured_error_msg) if text and text != NONE)
    return f"{status.state.name} {said}".strip()
