# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Adapt the containers that TorchX's DockerScheduler would create. Pure, except for listing this machine's GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from docker.types import DeviceRequest
from torchx.schedulers.docker_scheduler import LABEL_REPLICA_ID, LABEL_ROLE_NAME, DockerContainer, DockerJob
from torchx.specs import AppDef

from torchx_monarch.backends.errors import UserError
from torchx_monarch.backends.local import gpus
from torchx_monarch.backends.validation import check_names
from torchx_monarch.model.env_names import JOB_VARIABLES, replica0_variable

LABEL_APP = "torchx-monarch/app"
"""Label with the app, encoded by ``appdef_codec.pack``. TorchX's own scheduler does not set it."""

LABEL_GRACE = "torchx-monarch/grace"
"""Label with the run option ``grace``, in seconds."""

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
EVENTS = "MONARCH_EVENTS"
STARTS = "MONARCH_STARTS"

_RANK0 = "TORCHX_RANK0_HOST"

_LONGEST_NAME = 63
"""Characters in a host name, and in one label of a DNS name."""

_LONGEST_ROLE = 20


def check(app: AppDef, grace: int) -> None:
    """Validate an app and its grace period before submission.

    Args:
        app: the app.
        grace: the run option ``grace``, in seconds.

    Raises:
        ValueError: two roles have the same name, or the grace period is negative.
    """
    check_names(app)
    if grace < 0:
        raise UserError(f"the run option grace is {grace}; it is a number of seconds, 0 or more")


def adapt(job: DockerJob, app: AppDef, init: bool, environ: Mapping[str, str]) -> None:
    """Adapt TorchX's request in place.

    Args:
        job: the request, as ``DockerScheduler._submit_dryrun`` returns it.
        app: the app that the request was made from.
        init: whether docker-init is process 1 of each container.
        environ: the submitter's environment, which limits the GPUs that replicas may use.
    """
    names = host_names(job.app_id, {role.name: role.num_replicas for role in app.roles})
    given = {role.name: role.env for role in app.roles}
    retried = {role.name: role.max_retries > 0 for role in app.roles}
    for container in job.containers:
        kwargs: dict[str, object] = container.kwargs
        labels: dict[str, str] = kwargs["labels"]  # type: ignore[assignment]
        role = labels[LABEL_ROLE_NAME]
        name = names[role][int(labels[LABEL_REPLICA_ID])]
        # TorchX's names can have 66 characters, with which no container starts, and be the same for two roles.
        kwargs["name"] = kwargs["hostname"] = name
        # TorchX runs the command itself as process 1, to which the kernel delivers no signal without a handler:
        # `docker stop` of a shell, or of a Python that is still importing, then takes the whole grace period.
        kwargs["init"] = init
        env: dict[str, str] = kwargs["environment"]  # type: ignore[assignment]
        for variable in JOB_VARIABLES:
            if variable not in given[role]:
                env.pop(variable, None)  # set by copy_env, if submitted from within another job
        env[_RANK0] = names[app.roles[0].name][0]
        env |= {replica0_variable(index): names[each.name][0] for index, each in enumerate(app.roles)}
        # The name keeps replicas apart even if they all mount one folder of this machine as their /tmp.
        env.setdefault("MONARCH_LOG_DIR", f"/tmp/torchx-monarch/{name}")
        env.setdefault(EVENTS, f"{env['MONARCH_LOG_DIR']}/events.jsonl")
        env.setdefault(ERROR_FILE, f"/tmp/{name}.error.json")
        if retried[role]:
            env.setdefault(STARTS, f"/tmp/{name}.starts.json:/var/tmp/{name}.starts.json")
        # Python writes to a pipe in blocks; without buffering, a followed log shows each line when it is printed.
        env.setdefault("PYTHONUNBUFFERED", "1")
    _give_gpus(job.containers, app, environ)
    for container in job.containers:
        # TorchX uses docker-py's subclasses of dict here, with which `torchx run --dryrun --json` fails.
        for key in ("mounts", "device_requests"):
            if key in container.kwargs:
                container.kwargs[key] = [dict(each) for each in container.kwargs[key]]


def host_names(app_id: str, roles: Mapping[str, int]) -> dict[str, list[str]]:
    """Return the names of each role's containers, which are also their host names and DNS names on the network.

    Args:
        app_id: the app's id; only the end of a long id is kept, because it ends in a random string.
        roles: number of replicas, by role name.
    """
    short = {role: _safe(role)[:_LONGEST_ROLE].strip("-") or "role" for role in roles}
    if len(set(short.values())) < len(short):
        short = {role: f"{name}-{index}" for index, (role, name) in enumerate(short.items())}
    return {role: [_name(app_id, short[role], replica) for replica in range(count)] for role, count in roles.items()}


def _name(app_id: str, role: str, replica: int) -> str:
    end = f"-{role}-{replica}"
    # A name must begin with a letter or a digit.
    return _safe(app_id)[-(_LONGEST_NAME - len(end)) :].lstrip("-") + end


def _safe(name: str) -> str:
    # Dots are replaced, too: they would split the name into DNS labels, each of which needs letters.
    return re.sub(r"[^a-z0-9-]", "-", name.lower())


def _give_gpus(containers: Sequence[DockerContainer], app: AppDef, environ: Mapping[str, str]) -> None:
    """Assign distinct GPUs to each replica, if this machine has as many as the app asks for.

    TorchX requests a number of GPUs, and dockerd gives the same first ones to every container (torchx#104).
    """
    wanted = [(role.num_replicas, role.resource.gpu) for role in app.roles]
    if sum(replicas for replicas, each in wanted if each > 0) < 2:
        return
    assigned = gpus.assign(wanted, gpus.devices(environ))
    if assigned is None:
        return
    for container, devices in zip(containers, [each for role in assigned for each in role], strict=True):
        if devices is not None:
            container.kwargs["device_requests"] = [
                DeviceRequest(device_ids=devices.split(","), capabilities=[["compute", "utility"]])
            ]
