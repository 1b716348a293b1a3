# SPDX-License-Identifier: BSD-3-Clause
"""What ``MonarchJob`` and ``SPMDJob`` share: a job of a scheduler to whose hosts this process attaches.

``controller.mesh_clients`` is the other side of the connection.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from torchx_monarch import __version__
from torchx_monarch.client.connection import Connection, Target
from torchx_monarch.client.hosts import Hosts, say
from torchx_monarch.exceptions import ClientError, UnreachableError
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.monarch_adapter import monarch_api
from torchx_monarch.system import safe_files
from torchx_monarch.transport import local_addresses
from torchx_monarch.transport.address import Address

monarch_api.prepare_import()

from monarch.job import JobTrait, job_load  # noqa: E402

_log = logging.getLogger("torchx_monarch")

CACHE = ".monarch/job_state.pkl"
"""File in which Monarch caches a job's state. A script started by ``apply(client_script=...)`` reads it there."""

_ASK_EVERY = 1.0
"""Longest pause between two status requests for a job that ends, in seconds; the first pauses are shorter."""

_END_TIMEOUT = 15.0
"""Seconds that ``kill`` waits for the end of the hosts."""

_UNMOUNT_TIMEOUT = 15.0
"""Seconds for which ``kill`` retries to remove busy mounts: a closed file keeps its mount busy for a moment."""

_HOSTS_TIMEOUT = 5.0
"""Seconds to wait until the hosts are together; then the caller checks whether the job is still alive, and retries."""

_START_TIMEOUT = 90.0
"""Seconds to wait for the worker loops of the hosts, for which replica 0 waits 60 s."""


class AttachedJob(JobTrait):  # type: ignore[misc]
    """Attach this process, as a Monarch client, to the hosts of an app, which has a handle after ``apply``."""

    handle: str | None

    def __init__(self, start_timeout: float | None = None, out_of_cluster: bool = False) -> None:
        super().__init__()
        self._start_timeout = start_timeout
        self._out_of_cluster = out_of_cluster
        self._attachments: dict[str, Attachment] = {}
        self._attached_meshes: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        # Sockets cannot be pickled.
        return {**self.__dict__, "_attachments": {}, "_attached_meshes": [], "version": __version__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if (version := state.pop("version", "of an earlier version")) != __version__:
            raise ValueError(f"it was saved by torchx-monarch {version}, and this is {__version__}")
        self.__dict__.update(state)

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

    def _connect_host_meshes(self, running_job: JobTrait) -> dict[str, Any]:
        # super() starts Monarch's sidecar process for mounts and telemetry, which reaches the hosts the same way as
        # this process: attach first.
        if isinstance(running_job, AttachedJob):
            running_job._attach()
        meshes: dict[str, Any] = super()._connect_host_meshes(running_job)
        return meshes

    def _load_cached(self, cached_path: str | None) -> JobTrait | None:
        if cached_path is None:
            return None
        try:
            cached = job_load(cached_path)
            _ = cached.active  # which a job that another version of Monarch has saved may lack
        except OSError:  # there is none, or it cannot be read
            return super()._load_cached(cached_path)
        except Exception as error:  # whatever the unpickling of something else raises
            discard_cached_job(cached_path, f"it cannot be loaded: {error or type(error).__name__}")
            return None
        return super()._load_cached(cached_path) if self._may_use(cached) else None

    def _may_use(self, cached: JobTrait) -> bool:
        """Whether Monarch may use a cached job if it can run this one, and end it if it cannot."""
        return True

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

    def _is_running(self) -> bool:
        raise NotImplementedError

    def _roles(self) -> list[str]:
        raise NotImplementedError

    def _hosts_of(self, role: str) -> Hosts:
        assert self.handle is not None
        return Hosts(self.handle, role)

    def _meshes(self) -> dict[str, Any]:
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
        """Stop this process's meshes if the hosts are still connected, forbid their use, and close all connections."""
        is_attached = any(attachment.is_open for attachment in self._attachments.values())
        for mesh in self._attached_meshes:
            if is_attached:
                with contextlib.suppress(Exception):
                    monarch_api.stop_mesh(mesh)
            monarch_api.forbid(mesh, f"{self.handle} was killed: its meshes cannot be used")
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


def discard_cached_job(path: str, why: str) -> None:
    """Remove the cached state of a job, but no link to it, and warn of that."""
    path = os.path.realpath(path)
    _log.warning("removing the cached state of a job, %s: %s", path, why)
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)


# -- the connection to the hosts of a role -----------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Attachment:
    """Hold a connection to replica 0 of a role. The hosts count this process as their client while it is open.

    Attributes:
        link: the connection.
        address: where replica 0 listens.
        addresses: Monarch addresses of the hosts, ordered by replica id.
        leaf: ``certificate``, ``key`` and ``authority`` for Monarch's TLS, as PEM; None if all hosts run on this
            machine.
        stale: whether one of the hosts is lost, or its worker loop has ended, as far as ``is_open`` has read it.
    """

    link: Connection
    address: Address
    addresses: list[str]
    leaf: Mapping[str, str] | None
    stale: bool = False

    @classmethod
    def open(cls, target: Target, whose: str) -> Attachment:
        """Attach to the hosts of a role, whose replica 0 is the target; raise as ``receive`` does."""
        names = sorted({*local_addresses.interfaces().values(), socket.gethostname()})
        link = Connection.open(target, {"type": "attach", "names": names})
        try:
            return cls.receive(link, target.address, whose)
        except BaseException:
            link.close()
            raise

    @classmethod
    def receive(cls, link: Connection, address: Address, whose: str, timeout: float = _HOSTS_TIMEOUT) -> Attachment:
        """Receive the answer to the greeting, after at most ``timeout`` seconds until the hosts are together.

        Raises:
            UnreachableError: not all hosts of the role have started, or replica 0 cannot be reached.
            RefusedError: replica 0 does not accept clients, or a host cannot start its worker loop.
            ClientError: the hosts have another version of Monarch than this process.
        """
        try:
            answer = link.answer(timeout)  # attaching
            if answer["type"] != "attached":
                answer = link.answer(_START_TIMEOUT)
        except UnreachableError as error:
            raise UnreachableError(f"the hosts of {whose} are not all there: {error}", error.final) from None
        if (theirs := answer["monarch"]) != (ours := metadata.version("torchmonarch")):
            raise ClientError(f"the hosts of {whose} have torchmonarch {theirs}, and this process {ours}")
        hosts = sorted(answer["hosts"], key=lambda host: int(host["replica"]))
        first, *others = (str(host["address"]) for host in hosts)
        if address.networked:  # this machine may reach replica 0 under another name than the other hosts do
            first = re.sub(r"://[^:/]+:", f"://{address.host}:", first)
        return cls(link, address, [first, *others], answer["leaf"])

    @property
    def is_open(self) -> bool:
        """Whether replica 0 still holds the connection."""
        try:
            while self.link.receive(0.001) is not None:  # replica 0 sends nothing but ``changed`` after its answer
                self.stale = True
            return False
        except TimeoutError:
            return True
        except (UnreachableError, OSError, ValueError):
            return False


class _Client:
    """Manage this process's identity as a Monarch client over a network.

    Monarch allows one listening address and one certificate for each process, so a process can be a client of one
    networked job at a time.
    """

    def __init__(self) -> None:
        self._folder = ""
        self._url = ""
        # They must outlive the job object: ``SPMDJob.attach(handle).state().workers``.
        self._attached: dict[Attachment, str] = {}

    def join(self, handle: str, attachment: Attachment) -> tuple[str, list[str]]:
        """Return the URL to listen on as a client of these hosts, and the paths of certificate, key and authority.

        The URL is empty if the hosts run on this machine; there are no paths without TLS.

        Raises:
            ClientError: this process is the client of another job over a network.
        """
        address = attachment.address
        self._attached = {other: job for other, job in self._attached.items() if other.is_open}
        if not address.networked:
            self._attached[attachment] = handle
            return "", []
        for other, job in self._attached.items():
            if other.address.networked and job != handle:
                raise ClientError(
                    f"this process is a client of {job}, and Monarch has one certificate for each process: kill() that "
                    "job first, or use another process"
                )
        scheme = "tls" if attachment.leaf else "tcp"
        if not self._url.startswith(f"{scheme}:"):  # Monarch refuses a second address (``become_client``)
            here = local_addresses.advertised(address, is_first=False, options=HostSpec())
            self._url = f"{scheme}://{here}:0"
        self._attached[attachment] = handle
        return self._url, self.files(attachment.leaf) if attachment.leaf else []

    def files(self, leaf: Mapping[str, str]) -> list[str]:
        if not self._folder:
            self._folder = tempfile.mkdtemp(prefix="tm-client-")
            atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
        paths = []
        for name in ("certificate", "key", "authority"):
            path = os.path.join(self._folder, name)
            safe_files.replace_file(path, leaf[name].encode())
            paths.append(path)
        return paths


client = _Client()
"""The client identity of this process."""
