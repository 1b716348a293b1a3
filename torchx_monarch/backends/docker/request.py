# SPDX-License-Identifier: BSD-3-Clause
"""The run options of the Docker backend, and the containers that run an app."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from docker.types import DeviceRequest
from torchx.schedulers.docker_scheduler import (
    LABEL_REPLICA_ID,
    LABEL_ROLE_NAME,
    DockerContainer,
    DockerJob,
    DockerScheduler,
    Opts,
)
from torchx.specs import AppDef

from torchx_monarch.backends.core import torchx_api
from torchx_monarch.backends.core.options import NetworkOpts, dns_label, role_labels, safe_name
from torchx_monarch.backends.local import gpus
from torchx_monarch.model.env_names import JOB_VARIABLES, replica0_variables

LABEL_APP = "torchx-monarch/app"
"""Label with the app, the output of ``SubmittedApp.pack``. TorchX's own scheduler does not set it."""

LABEL_GRACE = "torchx-monarch/grace"
"""Label with the run option ``grace``, in seconds."""

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
LOG_DIR = "MONARCH_LOG_DIR"
STARTS = "MONARCH_STARTS"

_MAX_NAME = 63
"""Characters in a host name, and in one label of a DNS name."""

_MAX_ROLE = 20


@dataclasses.dataclass
class DockerOpts(NetworkOpts, Opts):  # type: ignore[misc]
    """The run options of TorchX's ``local_docker``, those of all network backends, and ``init``."""

    init: bool = True
    """Have docker-init be process 1 of each container, which passes signals on and reaps orphans; False where the
    daemon lacks it."""


def render(app: AppDef, options: DockerOpts) -> DockerJob:
    """Return the containers that run an app: those that TorchX would create, adapted."""
    # TorchX uses the name unchanged, but a slash would end the app's handle, and dockerd refuses it for a volume.
    named = dataclasses.replace(app, name=safe_name(app.name))
    # Not submit_dryrun: it calls each role's pre_proc, which the scheduler around this backend does.
    job: DockerJob = torchx_api.render(DockerScheduler("torchx"), named, options).request
    names = host_names(job.app_id, {role.name: role.num_replicas for role in app.roles})
    roles = {role.name: role for role in app.roles}
    _give_gpus(job.containers, app)
    for container in job.containers:
        kwargs: dict[str, Any] = container.kwargs
        labels, env = kwargs["labels"], kwargs["environment"]
        role = roles[labels[LABEL_ROLE_NAME]]
        name = names[role.name][int(labels[LABEL_REPLICA_ID])]
        # TorchX's names can have 66 characters, with which no container starts, and be the same for two roles.
        kwargs["name"] = kwargs["hostname"] = name
        # TorchX runs the command itself as process 1, to which the kernel delivers no signal without a handler:
        # `docker stop` of a shell, or of a Python that is still importing, then takes the whole grace period.
        kwargs["init"] = options.init
        labels[LABEL_GRACE] = str(options.grace)
        for variable in JOB_VARIABLES:
            if variable not in role.env:
                env.pop(variable, None)  # set by copy_env, if submitted from within another job
        env |= replica0_variables([names[role.name][0] for role in app.roles])
        # The name keeps replicas apart even if they all mount one folder of this machine as their /tmp.
        env.setdefault(LOG_DIR, f"/tmp/torchx-monarch/{name}")
        env.setdefault(ERROR_FILE, f"/tmp/{name}.error.json")
        if role.max_retries > 0:
            env.setdefault(STARTS, f"/tmp/{name}.starts.json:/var/tmp/{name}.starts.json")
        # TorchX uses docker-py's subclasses of dict here, with which `torchx run --dryrun --json` fails.
        for key in kwargs.keys() & {"mounts", "device_requests"}:
            kwargs[key] = [dict(entry) for entry in kwargs[key]]
    return job


def host_names(app_id: str, roles: Mapping[str, int]) -> dict[str, list[str]]:
    """Return the names of each role's containers, which are also their host names and DNS names on the network."""

    def name(role: str, replica: int) -> str:
        end = f"-{role}-{replica}"
        return dns_label(app_id)[-(_MAX_NAME - len(end)) :].lstrip("-") + end  # a name begins with a letter or digit

    labels = zip(role_labels(roles, _MAX_ROLE), roles.items(), strict=True)
    return {role: [name(label, replica) for replica in range(count)] for label, (role, count) in labels}


def _give_gpus(containers: Sequence[DockerContainer], app: AppDef) -> None:
    """Assign distinct GPUs to each replica, if this machine has as many as the app asks for.

    TorchX requests a number of GPUs, and dockerd gives the same first ones to every container (torchx#104).
    """
    counts = [max(0, role.resource.gpu) for role in app.roles for _ in range(role.num_replicas)]
    if sum(map(bool, counts)) < 2 or sum(counts) > len(available := gpus.devices(os.environ)):
        return
    rest = iter(available)
    for container, count in zip(containers, counts, strict=False):
        if devices := list(itertools.islice(rest, count)):
            request = DeviceRequest(device_ids=devices, capabilities=[["compute", "utility"]])
            container.kwargs["device_requests"] = [request]
