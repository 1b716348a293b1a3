# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The job that a script of ``monarch.controller`` runs in: the hosts of all its roles, as Monarch meshes."""

from __future__ import annotations

import functools
import json
import os
import sys
from typing import Any

from torchx_monarch.monarch_adapter import monarch_api

monarch_api.log_to_stderr()

from monarch.job import JobState  # noqa: E402

VARIABLE = "MONARCH_THIS_JOB"
"""In the environment of the script: the file that its host has written (``host.actor_host``)."""

_ATTACH_TIMEOUT = 60.0
"""Seconds for the hosts of a mesh, which were there when the script was started."""


class ThisJob:
    """The job around this process.

    Args:
        path: the file that says where its hosts are.

    Raises:
        RuntimeError: it cannot be read.
    """

    def __init__(self, path: str) -> None:
        try:
            with open(path) as file:
                self._job: dict[str, Any] = json.load(file)
        except (OSError, ValueError) as error:
            raise RuntimeError(f"{VARIABLE}={path} does not say where the hosts of this job are: {error}") from None

    @property
    def sizes(self) -> dict[str, int]:
        """How many hosts each role has."""
        return {name: len(addresses) for name, addresses in self._job["meshes"].items()}

    @functools.cached_property
    def meshes(self) -> dict[str, Any]:
        """The HostMesh of each role."""
        monarch_api.become_client(self._job["transport"], self._job["tls"], lambda text: print(text, file=sys.stderr))
        return {
            name: monarch_api.host_mesh(name, addresses, _ATTACH_TIMEOUT)
            for name, addresses in self._job["meshes"].items()
        }

    def state(self) -> JobState:
        """The hosts: ``state().trainers`` is the HostMesh of role ``trainers``.

        Raises:
            ClientError: Monarch was used in this process before and listens elsewhere, or hosts cannot be reached.
        """
        return JobState(self.meshes)


@functools.cache
def this_job() -> ThisJob:
    """The job that this script is the controller of.

    Raises:
        RuntimeError: this process is no script of ``monarch.controller`` or ``MonarchJob.apply(client_script=...)``.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        raise RuntimeError(
            "this_job() is for the script of a job: torchx run -s monarch_local monarch.controller script.py, or "
            "MonarchJob(...).apply(client_script='script.py'). From outside use MonarchJob(...).state()"
        )
    return ThisJob(path)
