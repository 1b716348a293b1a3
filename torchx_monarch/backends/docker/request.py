# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""From the containers that TorchX's DockerScheduler would make to those that we make. Pure, but for looking at GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from docker.types import DeviceRequest
from torchx.schedulers.docker_scheduler import LABEL_REPLICA_ID, LABEL_ROLE_NAME, DockerContainer, DockerJob
from torchx.specs import AppDef

from torchx_monarch.backends.errors import UserError
from torchx_monarch.backends.local import gpus
from torchx_monarch.backends.validation import check_names
from torchx_monarch.model.env_names import OF_A_JOB, replica0_variable

LABEL_APP = "torchx-monarch/app"
"""On every container of ours: the app as ``blob.pack`` has it. Its presence tells ours from TorchX's."""

LABEL_GRACE = "torchx-monarch/grace"
"""On every container of ours: the run option ``grace``."""

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
EVENTS = "MONARCH_EVENTS"
STARTS = "MONARCH_STARTS"

_RANK0 = "TORCHX_RANK0_HOST"

_LONGEST_NAME = 63
"""Of a host's name, and of one label of a name in the DNS."""

_LONGEST_ROLE = 20


def check(app: AppDef, grace: int) -> None:
    """Refuse what would go wrong later.

    Raises:
        ValueError: two roles have one name, or the grace is negative.
    """
    check_names(app)
    if grace < 0:
        raise UserError(f"the run option grace is {grace}; it is a number of seconds, 0 or more")


def adapt(job: DockerJob, app: AppDef, init: bool, environ: Mapping[str, str]) -> None:
    """Change TorchX's request into ours, in place.

    Args:
        app: what it was made of.
        init: have docker's init be process 1.
        environ: the submitter's environment, for the GPUs it may use.
    """
    names = host_names(job.app_id, {role.name: role.num_replicas for role in app.roles})
    given = {role.name: role.env for role in app.roles}
    retried = {role.name: role.max_retries > 0 for role in app.roles}
    for container in job.containers:
        kwargs: dict[str, object] = container.kwargs
        labels: dict[str, str] = kwargs["labels"]  # type: ignore[assignment]
        role = labels[LABEL_ROLE_NAME]
        name = names[role][int(labels[LABEL_REPLICA_ID])]
        # Upstream's names can have 66 characters, with which no container starts, and be the same for two roles.
        kwargs["name"] = kwargs["hostname"] = name
        # Upstream has the command itself as process 1, which the kernel keeps from every signal that it does not
        # handle: `docker stop` of a shell, or of a Python that is still importing, then takes all of the grace.
        kwargs["init"] = init
        env: dict[str, str] = kwargs["environment"]  # type: ignore[assignment]
        for variable in OF_A_JOB:
            if variable not in given[role]:
                env.pop(variable, None)  # copy_env, in a shell within another job
        env[_RANK0] = names[app.roles[0].name][0]
        env |= {replica0_variable(index): names[each.name][0] for index, each in enumerate(app.roles)}
        # A folder of its own even where all replicas have one folder of this machine as their /tmp.
        env.setdefault("MONARCH_LOG_DIR", f"/tmp/torchx-monarch/{name}")
        env.setdefault(EVENTS, f"{env['MONARCH_LOG_DIR']}/events.jsonl")
        env.setdefault(ERROR_FILE, f"/tmp/{name}.error.json")
        if retried[role]:
            env.setdefault(STARTS, f"/tmp/{name}.starts.json:/var/tmp/{name}.starts.json")
        # What a program writes into a pipe comes in blocks; people who follow a log want lines.
        env.setdefault("PYTHONUNBUFFERED", "1")
    _give_gpus(job.containers, app, environ)
    for container in job.containers:
        # Upstream's are of classes of docker-py's with which `torchx run --dryrun --json` fails.
        for key in ("mounts", "device_requests"):
            if key in container.kwargs:
                container.kwargs[key] = [dict(each) for each in container.kwargs[key]]


def host_names(app_id: str, roles: Mapping[str, int]) -> dict[str, list[str]]:
    """The name of each role's containers, which is their host name and the name by which the others find them.

    Args:
        app_id: ends in a random word, which is what is kept of a long one.
        roles: names and numbers of replicas.
    """
    short = {role: _safe(role)[:_LONGEST_ROLE].strip("-") or "role" for role in roles}
    if len(set(short.values())) < len(short):
        short = {role: f"{name}-{index}" for index, (role, name) in enumerate(short.items())}
    return {role: [_name(app_id, short[role], replica) for replica in range(count)] for role, count in roles.items()}


def _name(app_id: str, role: str, replica: int) -> str:
    end = f"-{role}-{replica}"
    # A name must not begin with what is neither letter nor digit.
    return _safe(app_id)[-(_LONGEST_NAME - len(end)) :].lstrip("-") + end


def _safe(name: str) -> str:
    # No dots: they would make a name of several parts, of which each needs letters.
    return re.sub(r"[^a-z0-9-]", "-", name.lower())


def _give_gpus(containers: Sequence[DockerContainer], app: AppDef, environ: Mapping[str, str]) -> None:
    """Give each replica GPUs of its own, where this machine has as many as the app asks for.

    Upstream asks for a number, and dockerd gives the same first ones to every container (torchx#104).
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
