# SPDX-License-Identifier: BSD-3-Clause
"""A Monarch job on any ``monarch_*`` scheduler. It replaces Monarch's LocalJob, ProcessJob and SlurmJob."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import shlex
from collections.abc import Mapping

from torchx.runner import get_runner
from torchx.specs import AppDef, CfgVal

from torchx_monarch.client import this_job
from torchx_monarch.client.attached_job import CACHE, AttachedJob, Attachment
from torchx_monarch.client.hosts import Hosts
from torchx_monarch.client.run_options import check_env
from torchx_monarch.command.allocation_spec import IDLE_TIMEOUT
from torchx_monarch.command.allocations import app_of_meshes, check_mesh_name, hold_for_clients
from torchx_monarch.model.env_names import BATCH_JOB, THIS_JOB
from torchx_monarch.monarch_adapter import monarch_api
from torchx_monarch.schedulers.monarch import scheduler_of

# After the base class, which prepares this import.
from monarch.job import JobState, JobTrait  # isort: skip

_log = logging.getLogger("torchx_monarch")


class MonarchJob(AttachedJob):
    """Run a TorchX app as a Monarch job: each role becomes a host mesh, each of its replicas a host.

    The hosts wait for actors, as an allocation does; the commands of the roles are not run::

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
        ValueError: the name of a role cannot be an attribute of ``state()``, or a variable in ``env`` has no value.
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
        check_env(env)
        super().__init__(start_timeout, out_of_cluster)
        self._app = copy.deepcopy(appdef) if isinstance(appdef, AppDef) else app_of_meshes(appdef)
        for role in self._app.roles:
            check_mesh_name(role.name)
            role.env.update(env or {})
        self._scheduler = scheduler
        self._cfg = dict(scheduler_cfg or {})
        self._idle_timeout = idle_timeout
        self._workspace = workspace
        self._handle: str | None = None

    @property
    def handle(self) -> str | None:  # type: ignore[override]
        """The job's TorchX handle, for ``torchx status`` and ``torchx log``; None before ``apply``."""
        running = self._running
        return running._handle if isinstance(running, MonarchJob) else self._handle

    # -- the abstract methods of JobTrait, and hooks -------------------------------------------------------------------

    def _create(self, client_script: str | None) -> None:
        if self._is_this_job():
            return
        scheduler_of(self._scheduler)
        words = shlex.split(client_script or "")
        if client_script is not None:
            if not words:
                raise ValueError("client_script is empty: give the script's path, and its arguments")
            if not os.path.basename(words[0]).startswith("python"):
                words = ["python", *words]
            monarch_api.batch_job(self).dump(CACHE)
        hosts = hold_for_clients(self._app, 0.0 if words else self._idle_timeout, words)
        with get_runner() as runner:
            self._handle = runner.run(hosts, self._scheduler, self._cfg, self._workspace)
        _log.info("%s", self._handle)

    def _attach(self) -> dict[str, Attachment]:
        return {} if self._is_this_job() else super()._attach()

    def _state(self) -> JobState:
        if self._is_this_job():
            return JobState(this_job.this_job().meshes)
        return JobState(self._meshes())

    def can_run(self, spec: JobTrait) -> bool:
        """Whether this job is alive and has the app, scheduler, run options, idle timeout and workspace of ``spec``."""
        return isinstance(spec, MonarchJob) and spec._spec_key() == self._spec_key() and self._is_running()

    def _is_running(self) -> bool:
        if self._is_this_job():
            return True
        found = self._hosts_of("").read_app(brief=True) if self.handle else None
        return found is not None and not found[1].state.is_terminal

    def _kill(self) -> None:
        if self._is_this_job():
            return  # the host ends the job when this script exits
        self._detach()
        if self._handle is None:
            return
        with contextlib.suppress(ValueError):
            Hosts(self._handle).release()
        self._wait_for_end()

    def _requires_sidecar_gateway(self) -> bool:
        return super()._requires_sidecar_gateway() and not self._is_this_job()

    def _roles(self) -> list[str]:
        return [role.name for role in self._app.roles]

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _spec_key(self) -> tuple[object, ...]:
        return self._app, self._scheduler, self._cfg, self._idle_timeout, self._workspace

    def _is_this_job(self) -> bool:
        """Whether this process is the client script of a job with the same meshes."""
        if os.environ.get(BATCH_JOB) != "1" or not os.environ.get(THIS_JOB):
            return False
        return this_job.this_job().sizes == {role.name: role.num_replicas for role in self._app.roles}
