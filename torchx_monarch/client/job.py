# SPDX-License-Identifier: BSD-3-Clause
"""A live allocation, or a batch job, as a Monarch job."""

from __future__ import annotations

import contextlib
from typing import Any

from torchx.runner import Runner

from torchx_monarch.client.allocation import Allocation
from torchx_monarch.client.attached_job import CACHE, AttachedJob
from torchx_monarch.client.hosts import ENDED, Hosts

# After the base class, which prepares this import.
from monarch.job import JobState, JobTrait, job_load  # isort: skip

_WORKERS = "workers"
"""The name of the first mesh in each job of ``monarch.job.spmd``."""


class SPMDJob(Allocation, AttachedJob):  # type: ignore[misc]  # its handle is never None
    """Represent a live allocation: the hosts of one role, which wait for runs, and are a Monarch host mesh.

    ``serve`` takes new hosts and returns an ``SPMDJob``; ``SPMDJob.attach`` returns one for hosts that were taken
    elsewhere. As a context manager, it releases the hosts on exit::

        with serve("torchrun --nproc-per-node 4 train.py", scheduler="monarch_slurm") as job:
            job.run_spmd()
            evaluators = job.state().workers.spawn_procs().spawn("evaluator", Evaluator)
            job.run_spmd(["train.py", "--lr", "0.2"])

    Methods that need the hosts wait for them to start and print the reason for waiting on stderr. They raise
    ``AllocationError`` if the hosts have ended or do not start in time, ``UnreachableError`` if they cannot be reached
    and waiting does not help, and ``RefusedError`` if they do not accept the request. An ``SPMDJob`` can be pickled and
    used in another process.

    The class is a Monarch ``JobTrait``: ``state()`` attaches this process to the hosts, and returns a ``JobState`` with
    the HostMesh ``workers``, and one for each role by its name. Actors run beside ranks, and end when this process
    does, or with the hosts. ``dump``, ``job_load``, ``enable_admin``, ``enable_telemetry``, ``remote_mount`` and
    ``gather_mount`` are Monarch's. A cached state of another job is ignored, and its hosts are left alone.

    Attributes and arguments are those of ``client.allocation.Allocation``.
    """

    def kill(self) -> None:
        """Release the hosts and end their runs and actors, by cancelling the app. Does nothing if the app has ended.

        Raises:
            RuntimeError: a mount stays busy (see ``AttachedJob.kill``).
        """
        AttachedJob.kill(self)
        Allocation.release(self)

    def release(self) -> None:
        """Release the hosts, as ``kill`` does."""
        self.kill()

    def state(self, cached_path: str | None = CACHE) -> JobState:
        """Return the host meshes of the job (see ``JobTrait.state``); ``workers`` is that of the first role."""
        state = super().state(cached_path)
        if _WORKERS not in state._hosts:  # and is no key: mounts, telemetry and ``monarch exec --all`` work on each
            setattr(state, _WORKERS, next(iter(state._hosts.values())))
        return state

    def remote_mount(
        self,
        source: str,
        mntpoint: str | None = None,
        meshes: list[str] | None = None,
        python_exe: str | None = ".venv/bin/python",
        **options: Any,
    ) -> None:
        """Mount a folder of this machine on the hosts (see ``JobTrait.remote_mount``).

        Raises:
            ValueError: the job has no such mesh, or the folder no such interpreter.
        """
        super().remote_mount(source, mntpoint, self._roles_of(meshes), python_exe, **options)

    def gather_mount(self, remote_mount_point: str, local_mount_point: str, meshes: list[str] | None = None) -> None:
        """Mount a folder of the hosts on this machine (see ``JobTrait.gather_mount``).

        Raises:
            ValueError: the job has no such mesh.
        """
        super().gather_mount(remote_mount_point, local_mount_point, self._roles_of(meshes))

    def _roles_of(self, meshes: list[str] | None) -> list[str] | None:
        """Return the roles of meshes: ``workers`` is the first role. Monarch ignores names that it does not find."""
        if meshes is None:
            return None
        roles = [role or _WORKERS for role in self._roles()]
        found = [roles[0] if mesh == _WORKERS and mesh not in roles else mesh for mesh in meshes]
        if wrong := [mesh for mesh in found if mesh not in roles]:
            raise ValueError(f"meshes={meshes!r}: {self.handle} has no {wrong[0]!r}, but {', '.join(roles)}")
        return found

    # -- the abstract methods of JobTrait, and hooks -------------------------------------------------------------------

    def _create(self, client_script: str | None) -> None:
        if client_script is not None:
            raise ValueError(
                f"client_script={client_script!r}: the hosts of {self.handle} run already. Start the script with "
                "MonarchJob.apply(client_script=...), or call state() of this job in it"
            )

    def _state(self) -> JobState:
        return JobState({role or _WORKERS: mesh for role, mesh in self._meshes().items()})

    def can_run(self, spec: JobTrait) -> bool:
        """Whether ``spec`` is the same app, and it has not ended."""
        return isinstance(spec, SPMDJob) and spec.handle == self.handle and self._is_running()

    def _kill(self) -> None:
        self._detach()

    def _load_cached(self, cached_path: str | None) -> JobTrait | None:
        with contextlib.suppress(FileNotFoundError):
            cached = job_load(cached_path) if cached_path is not None else self
            if not isinstance(cached, SPMDJob) or cached.handle != self.handle:
                return None
        return super()._load_cached(cached_path)

    def _roles(self) -> list[str]:
        return self._role_hosts.roles()

    def _hosts_of(self, role: str) -> Hosts:
        return self._role_hosts if role == self._roles()[0] else super()._hosts_of(role)

    def _is_running(self) -> bool:
        return self._role_hosts.status().state not in ENDED  # which the hosts themselves tell, through a tunnel, too

    @property
    def _runner(self) -> Runner:
        return self._role_hosts.runner
