# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Give a rank, or a controller script, access to the hosts of the job that it runs in, as Monarch meshes."""

from __future__ import annotations

import functools
import json
import os
import stat
import sys
from typing import Any

from torchx_monarch.client.attachment import Attachment, client
from torchx_monarch.client.connection import Connection
from torchx_monarch.exceptions import ClientError, UnreachableError
from torchx_monarch.model.env_names import THIS_JOB
from torchx_monarch.monarch_adapter import monarch_api
from torchx_monarch.transport.address import Address

monarch_api.prepare_import()

from monarch.job import JobState  # noqa: E402


class ThisJob:
    """The job that this process is a rank, or the controller script, of. ``this_job`` returns it.

    Args:
        path: path of a socket file of the rank's host (``host.attach_relay``), or of the script's JSON file with the
            hosts (``host.actor_workload``).

    Raises:
        ClientError: the hosts cannot be found.
        RefusedError: the hosts do not accept clients, or cannot start their worker loops.
    """

    def __init__(self, path: str) -> None:
        try:
            if stat.S_ISSOCK(os.stat(path).st_mode):
                self._job = self._attach(path)
            else:
                with open(path) as file:
                    self._job = json.load(file)
        except (OSError, ValueError, UnreachableError) as error:
            raise ClientError(f"{THIS_JOB}={path} does not say where the hosts of this job are: {error}") from None

    def _attach(self, path: str) -> dict[str, Any]:
        """Attach to the hosts through this rank's host; the connection stays open as long as this object lives."""
        address = Address("unix", path=path)
        link = Connection.dial(address)
        here = link.answer()
        self._attachment = Attachment.receive(link, address, f"role {here['role']}")
        leaf = self._attachment.leaf
        tls = client.files(leaf) if leaf else []
        return {"meshes": {here["role"]: self._attachment.addresses}, "transport": here["transport"], "tls": tls}

    @property
    def sizes(self) -> dict[str, int]:
        """The number of hosts of each role."""
        return {name: len(addresses) for name, addresses in self._job["meshes"].items()}

    @functools.cached_property
    def meshes(self) -> dict[str, Any]:
        """The HostMesh of each role."""

        def warn(text: str) -> None:
            print(f"INSECURE: {text}", file=sys.stderr)

        monarch_api.become_client(self._job["transport"], self._job["tls"], warn)
        return {name: monarch_api.host_mesh(name, addresses) for name, addresses in self._job["meshes"].items()}

    def state(self) -> JobState:
        """Return the host meshes: ``state().trainers`` is the HostMesh of role ``trainers``.

        ``state().workers`` is the HostMesh of the role of this process. In a rank it is the only one, and the worker
        loops on the hosts are this rank's own, and end with it: call it in one rank, mostly.

        Raises:
            ClientError: this process has used Monarch before, with another address; or the hosts cannot be reached.
        """
        return JobState({"workers": next(iter(self.meshes.values())), **self.meshes})


@functools.cache
def this_job() -> ThisJob:
    """Return the job that this process is a rank, or the controller script, of.

    In a torchrun program, or in the script::

        from torchx_monarch import this_job

        procs = this_job().state().trainers.spawn_procs(per_host={"gpus": 8})

    Raises:
        ClientError: this process is none of these, or its hosts cannot be found.
        RefusedError: the hosts do not accept clients, or cannot start their worker loops.
    """
    path = os.environ.get(THIS_JOB)
    if not path:
        raise ClientError(
            "this_job() is for the ranks of a job (torchx run -s monarch_local monarch.spmd train.py) and for a client "
            "script (monarch.controller script.py). From outside use SPMDJob.attach(HANDLE).state()"
        )
    return ThisJob(path)
