# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Any app on any scheduler of ours as a Monarch job: it stands where LocalJob, ProcessJob or SlurmJob stands."""

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
from torchx_monarch.client.attachment import Attachment, Live, NotYetError, client
from torchx_monarch.command.allocation_spec import IDLE_TIMEOUT
from torchx_monarch.command.meshes import app_of_meshes, check_mesh_name, waiting
from torchx_monarch.monarch_adapter import monarch_api
from torchx_monarch.schedulers.monarch import MonarchScheduler

monarch_api.log_to_stderr()

from monarch.job import JobState, JobTrait  # noqa: E402

_log = logging.getLogger("torchx_monarch")

_ATTACH_TIMEOUT = 60.0
"""Seconds for Monarch's own connections to the hosts of a mesh, once these have said that they are there."""

_ASK_EVERY = 1.0
"""Seconds between two looks at a job; the first are closer."""

_ASK_QUEUE_EVERY = 5.0
"""The same for one that waits in a queue, whose scheduler serves everybody."""

_SAY_EVERY = 30.0
"""Seconds between two words on what is waited for."""

_END_TIMEOUT = 15.0
"""Seconds that ``kill`` waits for the end of the hosts."""

_UNMOUNT_TIMEOUT = 15.0
"""Seconds for which ``kill`` tries to remove mounts that are busy: a closed file is released a moment later."""

_CACHE = ".monarch/job_state.pkl"
"""Where Monarch keeps the state of a job, and where a script started by ``apply(client_script=...)`` looks for it."""


class MonarchJob(JobTrait):  # type: ignore[misc]
    """An app as a Monarch job: each role is a mesh, its replicas the hosts; its command is not run.

    Everything that Monarch's ``JobTrait`` promises holds: ``apply``, ``state``, ``kill``, ``dump``, ``job_load``,
    ``enable_admin``, ``enable_telemetry``, ``remote_mount``, ``gather_mount``, and the cached state file, which is used
    again while the job lives and is the one that is asked for.

    Args:
        appdef: the roles; or ``{"trainers": 2, "dataloaders": 1}``, as Monarch's own jobs have it.
        scheduler: one of the ``monarch_*`` schedulers.
        scheduler_cfg: its run options.
        env: variables for the hosts of all roles, and so for their actors.
        idle_timeout: seconds without a client after which the hosts end; 0 for never.
        start_timeout: seconds until ``state()`` gives up waiting for hosts; None for no limit, as a queue may be long.
        out_of_cluster: go through replica 0 of the first role alone, for clients that hosts cannot dial back (behind
            NAT or a firewall). Monarch allows one such job in the life of a process.
        workspace: as for ``Runner.run``.

    Raises:
        ValueError: a role has a name that cannot be a mesh's, which is an attribute of ``state()``.
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
        self._live = Live(monarch_api.stop_mesh)

    @property
    def handle(self) -> str | None:
        """TorchX's handle of the job, for ``torchx status`` and ``torchx log``; None before it is applied."""
        running = self._running
        return running._handle if isinstance(running, MonarchJob) else self._handle

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_live": None}  # connections are this process's

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _live=Live(monarch_api.stop_mesh))

    # -- what JobTrait asks for ----------------------------------------------------------------------------------------

    def _create(self, client_script: str | None) -> None:
        if self._is_this_job():
            return
        runner = self._live.runner
        if not isinstance(runner._scheduler(self._scheduler), MonarchScheduler):
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

    def _connect_host_meshes(self, running_job: JobTrait) -> dict[str, Any]:
        # Mounts and telemetry are a process of their own, which is started next and reaches hosts as this one does.
        if isinstance(running_job, MonarchJob) and not running_job._is_this_job():
            running_job._attach()
        meshes: dict[str, Any] = super()._connect_host_meshes(running_job)
        return meshes

    def _state(self) -> JobState:
        if self._is_this_job():
            return this_job.this_job().state()
        meshes = {
            role: monarch_api.host_mesh(role, attachment.addresses, _ATTACH_TIMEOUT)
            for role, attachment in self._attach().items()
        }
        self._live.meshes += meshes.values()
        return JobState(meshes)

    def can_run(self, spec: JobTrait) -> bool:
        """Whether ``spec`` asks for what this job is, and it lives."""
        return isinstance(spec, MonarchJob) and spec._wanted() == self._wanted() and self._is_running()

    def _is_running(self) -> bool:
        if self._is_this_job():
            return True
        status = self._status_of_app()
        return status is not None and not is_terminal(status.state)

    def kill(self) -> None:
        """End the job and remove its mounts.

        Raises:
            RuntimeError: a mount stays busy. The job goes on, and ``kill`` may be called again.
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
            return  # it ends with its script
        self._live.close()
        if self._handle is None:
            return
        with contextlib.suppress(ValueError):
            self._live.runner.cancel(self._handle)
        until, pause = time.monotonic() + _END_TIMEOUT, 0.05
        while self._is_running() and time.monotonic() < until:
            time.sleep(pause)
            pause = min(2 * pause, _ASK_EVERY)

    def _cleanup_log_context(self) -> dict[str, Any]:
        return {"job_type": type(self).__name__, "handle": self._handle}

    def _rebind_connection_inputs(self, spec: JobTrait) -> None:
        if isinstance(spec, MonarchJob):
            self._start_timeout = spec._start_timeout
            self._out_of_cluster = spec._out_of_cluster

    def _requires_sidecar_gateway(self) -> bool:
        return self._out_of_cluster and self._scheduler != "monarch_local" and not self._is_this_job()

    def _prepare_client_gateway(self) -> None:
        self._attach()

    def _should_spawn_telemetry_worker_collector_actors(self) -> bool:
        return self._scheduler != "monarch_local"

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _wanted(self) -> tuple[object, ...]:
        return self._app, self._scheduler, self._cfg, self._idle_timeout, self._workspace

    def _is_this_job(self) -> bool:
        """Whether this process is the script of a job with these meshes."""
        if not monarch_api.in_batch_job() or not os.environ.get(this_job.VARIABLE):
            return False
        return this_job.this_job().sizes == {role.name: role.num_replicas for role in self._app.roles}

    def _status_of_app(self) -> AppStatus | None:
        return self._live.runner.status(self._handle) if self._handle else None

    def _attach(self) -> dict[str, Attachment]:
        """Be a client of the hosts of every role."""
        deadline = None if self._start_timeout is None else time.monotonic() + self._start_timeout
        found = {role.name: self._attach_to(role.name, deadline) for role in self._app.roles}
        first = found[self._app.roles[0].name]
        gateway = first.addresses[0] if self._out_of_cluster and first.address.networked else ""
        for attachment in found.values():
            assert self._handle is not None
            url, tls = client.join(self._handle, self._live, attachment)
            monarch_api.become_client(url, tls, lambda text: _log.warning("INSECURE: %s", text), gateway)
        return found

    def _attach_to(self, role: str, deadline: float | None) -> Attachment:
        if (open_one := self._live.attachment(role)) is not None:
            return open_one
        assert self._handle is not None
        pause, say = 0.05, time.monotonic() + _SAY_EVERY
        while True:
            status = self._status_of_app()
            if status is None or is_terminal(status.state):
                self._live.close()
                raise RuntimeError(f"the job {self._handle} is no longer active: {_in_words(status)}")
            try:
                attachment = Attachment.open(self._handle, role, self._live.runner)
                self._live.keep(role, attachment)
                return attachment
            except NotYetError as error:
                if deadline is not None and time.monotonic() > deadline:
                    waited = f"{self._start_timeout:g} s (start_timeout)"
                    raise RuntimeError(f"{self._handle} is {status.state.name} after {waited}: {error}") from None
                if time.monotonic() > say:
                    _log.warning("%s is %s; waiting for the hosts of %s: %s", self._handle, status.state, role, error)
                    say = time.monotonic() + _SAY_EVERY
            time.sleep(pause)
            pause = min(2 * pause, _ASK_QUEUE_EVERY if status.state is AppState.PENDING else _ASK_EVERY)


def _in_words(status: AppStatus | None) -> str:
    if status is None:
        return "its scheduler knows nothing of it"
    said = " ".join(text for text in (status.msg, status.structured_error_msg) if text and text != NONE)
    return f"{status.state.name} {said}".strip()
