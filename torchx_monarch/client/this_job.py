# SPDX-License-Identifier: BSD-3-Clause
"""Give a rank, or a controller script, access to the hosts of the job that it runs in, as Monarch meshes."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from torchx_monarch.client.attached_job import Attachment, client
from torchx_monarch.client.connection import Connection
from torchx_monarch.exceptions import ClientError, UnreachableError
from torchx_monarch.model.env_names import THIS_JOB
from torchx_monarch.monarch_adapter import monarch_api
from torchx_monarch.transport.address import Address

monarch_api.prepare_import()

from monarch.job import JobState  # noqa: E402


class ThisJob:
    """The job that this process is a rank, or the controller script, of. ``this_job`` returns it.

    ``path`` is the socket file of this rank's host (``host.worker_loops``).
    """

    def __init__(self, path: str) -> None:
        self._address = Address("unix", path=path)
        try:
            here, own = self._dial("")
            links = {here["role"]: own, **{role: self._dial(role)[1] for role in here["others"]}}
            # The hosts count this process as their client while the connections are open.
            self._attachments = {
                role: Attachment.receive(link, self._address, f"role {role}", here["timeout"])
                for role, link in links.items()
            }
        except (OSError, ValueError, UnreachableError) as error:
            raise ClientError(f"{THIS_JOB}={path} does not say where the hosts of this job are: {error}") from None
        self._transport = str(here["transport"])

    def _dial(self, role: str) -> tuple[dict[str, Any], Connection]:
        """Ask this rank's host to attach it to a role; return what the host says of itself, and the connection."""
        link = Connection.dial(self._address)
        link.send({"role": role})
        return link.answer(), link

    @property
    def sizes(self) -> dict[str, int]:
        """The number of hosts of each role."""
        return {role: len(attachment.addresses) for role, attachment in self._attachments.items()}

    @functools.cached_property
    def meshes(self) -> dict[str, Any]:
        """The HostMesh of each role."""

        def warn(text: str) -> None:
            print(f"INSECURE: {text}", file=sys.stderr)

        leaf = next(iter(self._attachments.values())).leaf
        monarch_api.become_client(self._transport, client.files(leaf) if leaf else [], warn)
        return {
            role: monarch_api.host_mesh(role, attachment.addresses) for role, attachment in self._attachments.items()
        }

    def state(self) -> JobState:
        """Return the host meshes: ``state().trainers`` is the HostMesh of role ``trainers``.

        ``state().workers`` is the HostMesh of the role of this process; in a rank it is the only one. The worker loops
        on the hosts are this process's own, and end with it: in a program of several ranks call it in one, mostly.

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
