# SPDX-License-Identifier: BSD-3-Clause
"""The base class of a job: the private hooks of Monarch's ``JobTrait`` under names of ours.

Importing this module imports Monarch.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torchx_monarch.monarch_adapter import monarch_api

monarch_api.prepare_import()

from monarch.job import JobState, JobTrait, job_load  # noqa: E402

_CACHE = ".monarch/job_state.pkl"


class SchedulerJob(JobTrait):  # type: ignore[misc]
    """Adapt a job whose hosts are started by a scheduler to Monarch 0.7.

    A subclass also implements ``JobTrait``'s abstract methods: ``_create``, ``_state``, ``_kill`` and ``can_run``.
    """

    def _active_job(self) -> JobTrait | None:
        """Return the job that runs, which may be another object: one from the cached state; None before ``apply``."""
        return self._running

    def _lives(self) -> bool:
        """Return whether the job runs, by what its scheduler says."""
        raise NotImplementedError

    def _attach_first(self, active: JobTrait) -> None:
        """Attach this process to the hosts of the active job, before anything else connects to them."""

    def _adopt(self, spec: JobTrait) -> None:
        """Take over what belongs to this process from the job that the script has made: this one is from a cache."""

    def _is_other_job(self, cached: JobTrait) -> bool:
        """Return whether a cached state is that of another job, which is left alone."""
        return False

    def _identity(self) -> dict[str, Any]:
        """Return what names the job in Monarch's log."""
        return {}

    def _sidecar_goes_through_client(self) -> bool:
        """Return whether Monarch's sidecar process reaches the hosts only through this process's gateway."""
        return False

    def _on_one_machine(self) -> bool:
        """Return whether all hosts share a machine, so that a collector of telemetry on each of them is of no use."""
        return False

    def _alias_of_first_mesh(self) -> str:
        """Return another name of the first mesh; empty for none. It is no key of the meshes: mounts, telemetry and
        ``monarch exec --all`` work on each of these."""
        return ""

    # -- Monarch's hooks -----------------------------------------------------------------------------------------------

    def state(self, cached_path: str | None = _CACHE) -> JobState:
        """Return the host meshes of the job (see ``JobTrait.state``)."""
        state = super().state(cached_path)
        if (alias := self._alias_of_first_mesh()) and alias not in state._hosts:
            setattr(state, alias, next(iter(state._hosts.values())))
        return state

    def _is_running(self) -> bool:
        return self._lives()

    def _connect_host_meshes(self, running_job: JobTrait) -> dict[str, Any]:
        # super() starts Monarch's sidecar process for mounts and telemetry, which reaches the hosts the same way as
        # this process: attach first.
        self._attach_first(running_job)
        meshes: dict[str, Any] = super()._connect_host_meshes(running_job)
        return meshes

    def _load_cached(self, cached_path: str | None) -> JobTrait | None:
        with contextlib.suppress(FileNotFoundError):
            if cached_path is not None and self._is_other_job(job_load(cached_path)):
                return None
        return super()._load_cached(cached_path)

    def _cleanup_log_context(self) -> dict[str, Any]:
        return {"job_type": type(self).__name__, **self._identity()}

    def _rebind_connection_inputs(self, spec: JobTrait) -> None:
        self._adopt(spec)

    def _requires_sidecar_gateway(self) -> bool:
        return self._sidecar_goes_through_client()

    def _prepare_client_gateway(self) -> None:
        self._attach_first(self)

    def _should_spawn_telemetry_worker_collector_actors(self) -> bool:
        return not self._on_one_machine()
