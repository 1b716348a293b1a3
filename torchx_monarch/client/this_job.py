# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Give a controller script access to the hosts of the job that it runs in, as Monarch meshes."""

from __future__ import annotations

import functools
import json
import os
import sys
from typing import Any

from torchx_monarch.exceptions import ClientError
from torchx_monarch.monarch_adapter import monarch_api

monarch_api.prepare_import()

from monarch.job import JobState  # noqa: E402

VARIABLE = "MONARCH_THIS_JOB"
"""Environment variable of the script: path of the JSON file with the hosts, which ``host.actor_workload`` writes."""


class ThisJob:
    """The job that this process is the controller script of. ``this_job`` returns it.

    Args:
        path: path of the JSON file with the Monarch addresses of the hosts.

    Raises:
        ClientError: the file cannot be read.
    """

    def __init__(self, path: str) -> None:
        try:
            with open(path) as file:
                self._job: dict[str, Any] = json.load(file)
        except (OSError, ValueError) as error:
            raise ClientError(f"{VARIABLE}={path} does not say where the hosts of this job are: {error}") from None

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

        Raises:
            ClientError: this process has used Monarch before, with another address; or the hosts cannot be reached.
        """
        return JobState(self.meshes)


@functools.cache
def this_job() -> ThisJob:
    """Return the job that this process is the controller script of.

    In the script::

        from torchx_monarch import this_job

        procs = this_job().state().trainers.spawn_procs(per_host={"gpus": 8})

    Raises:
        ClientError: neither ``monarch.controller`` nor ``MonarchJob.apply(client_script=...)`` started this process.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        raise ClientError(
            "this_job() is for the script of a job: torchx run -s monarch_local monarch.controller script.py, or "
            "MonarchJob(...).apply(client_script='script.py'). From outside use MonarchJob(...).state()"
        )
    return ThisJob(path)
