# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Render the job definition and the job of an app, as a dry run shows them. Sends no request.

An app of several replicas becomes one multi-node parallel job with a node range for each role, so that Batch starts all
nodes or none. Such a job cannot run on Spot or share instances with other jobs. So an app of one replica becomes a
container job, unless its resource names an instance type, which only a node range can request.
"""

from __future__ import annotations

import getpass
import json
import re
import secrets
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torchx
import yaml
from torchx import settings
from torchx.schedulers.ids import make_unique
from torchx.specs import AppDef, Role

from torchx_monarch.backends import appdef_codec, validation
from torchx_monarch.backends.aws_batch import command, container
from torchx_monarch.backends.aws_batch.options import AWSBatchOpts
from torchx_monarch.backends.protocols import CREDENTIALS, PLACEHOLDER
from torchx_monarch.model.exit_codes import NO_RESTART
from torchx_monarch.system.signed_line import KEY_VARIABLE

SCHEDULER = "monarch_aws_batch"
"""The scheduler's registered name."""

TAG_VERSION = "torchx.pytorch.org/version"
TAG_APP = "torchx.pytorch.org/app-name"
TAG_USER = "torchx.pytorch.org/user"
TAG_SCHEDULER = "torchx-monarch/scheduler"
"""Tag with ``SCHEDULER``, by which ``list`` knows our jobs; TorchX's former scheduler set the other tags only."""

TAG_DELETED = "torchx-monarch/deleted"
"""Tag of deleted jobs. Batch itself keeps every job for a week after its end."""

APP_PARAMETER = "torchx-monarch-app"
"""Job parameter that holds the app, packed by ``appdef_codec.pack``. Batch passes parameters to no container."""

ROLE_NAME = "TORCHX_ROLE_NAME"
"""Variable of each container, from TorchX's former scheduler. It names the roles if the app is too large to store."""

SECRET_ARN = "(ARN of the secret made when the job is submitted)"
"""Placeholder for the secret's ARN until the job is submitted."""

_ATTEMPT = "AWS_BATCH_JOB_ATTEMPT"
"""Batch's variable with the number of the job's attempt, the same on all nodes."""

_MOST_ROLES = 5
"""Most node ranges of one job."""

_MOST_ATTEMPTS = 10

_LARGEST_DEFINITION = 24 << 10
"""AWS Batch's quota for a RegisterJobDefinition request, in bytes."""

_LARGEST_SUBMISSION = 30 << 10
"""AWS Batch's quota for a SubmitJob request, in bytes."""

_CREDENTIALS_SIZE = 2048
"""Largest size in bytes of the credentials that replace their placeholder."""

_LONGEST_NAME = 128

_MOST_TAGS = 50


@dataclass
class BatchJob:
    """The request for one app.

    Attributes:
        name: name of the job and of its definition.
        queue: name of the queue.
        definition: arguments of RegisterJobDefinition.
        submit: arguments of SubmitJob; ``schedule`` replaces ``jobDefinition`` by the ARN of the registered revision.
        images_to_push: repository and tag for each local image; empty for none.
        secret: arguments of Secrets Manager's CreateSecret; empty for no secret.
    """

    name: str
    queue: str
    definition: dict[str, Any]
    submit: dict[str, Any]
    images_to_push: dict[str, tuple[str, str]] = field(default_factory=dict)
    secret: dict[str, Any] = field(default_factory=dict)

    @property
    def app_id(self) -> str:
        """The app's id, QUEUE:NAME, as in TorchX's former scheduler."""
        return f"{self.queue}:{self.name}"

    def __str__(self) -> str:
        """Return the request as YAML for a dry run, with the packed app replaced by its size."""
        shown = asdict(self)
        parameters = shown["submit"].get("parameters", {})
        if APP_PARAMETER in parameters:
            parameters[APP_PARAMETER] = f"(the app, {len(parameters[APP_PARAMETER])} bytes)"
        return str(yaml.safe_dump(json.loads(json.dumps(shown)), sort_keys=False))


def new_name(app_name: str) -> str:
    """Return a unique job name of the characters that Batch allows."""
    safe = re.sub(r"[^A-Za-z0-9_-]", "-", make_unique(app_name))[-_LONGEST_NAME:]
    return safe.lstrip("-_") or "app"


def queue_name(queue: str) -> str:
    """Return the name of a queue from its name or ARN."""
    return queue.rpartition("/")[2]


def render(app: AppDef, cfg: AWSBatchOpts) -> BatchJob:
    """Return the request for an app.

    Args:
        app: the app; its images must be in a registry that the nodes can reach.
        cfg: the run options.

    Raises:
        ValueError: AWS Batch cannot run the app; the message says what is allowed.
    """
    _check(app, cfg)
    name, queue = new_name(app.name), queue_name(cfg.queue)
    result_key = secrets.token_hex()
    containers, first = [], 0
    for index, role in enumerate(app.roles):
        words, env = command.render(role, f"{queue}:{name}", first)
        env |= {"TORCHX_ROLE_IDX": str(index), ROLE_NAME: role.name, settings.ENV_TORCHX_IMAGE: role.image}
        env[KEY_VARIABLE] = result_key
        env.setdefault("PYTHONUNBUFFERED", "1")  # else Python buffers output to a pipe in blocks
        if CREDENTIALS in role.env and len(app.roles) > 1:
            env["MONARCH_START"] = f"@{_ATTEMPT}"
        secret = env.pop(CREDENTIALS, None) if cfg.secret else None
        containers.append(container.properties(role, words, env, cfg))
        if secret is not None:
            containers[-1]["secrets"] = [{"name": CREDENTIALS, "valueFrom": SECRET_ARN}]
        first += role.num_replicas
    definition: dict[str, Any] = {"jobDefinitionName": name, "tags": _tags(app, cfg)}
    if _is_single(app, cfg):
        definition |= {"type": "container", "platformCapabilities": ["EC2"], "containerProperties": containers[0]}
    else:
        definition |= {"type": "multinode", "nodeProperties": _nodes(app, containers)}
    definition["retryStrategy"] = _retries(app, cfg)
    if cfg.timeout is not None:
        definition["timeout"] = {"attemptDurationSeconds": cfg.timeout}
    submit: dict[str, Any] = {
        "jobName": name,
        "jobQueue": cfg.queue,
        "jobDefinition": name,
        "tags": dict(definition["tags"]),
        "parameters": {APP_PARAMETER: appdef_codec.pack(app)},
    }
    if cfg.share_id is not None:
        submit["shareIdentifier"] = cfg.share_id
        definition["schedulingPriority"] = cfg.priority
    job = BatchJob(name, queue, definition, submit)
    if any("secrets" in one for one in containers):
        job.secret = {
            "Name": f"torchx-monarch/{name}",
            "Description": f"Credentials of the hosts of the AWS Batch job {name}; removed by torchx delete",
            "SecretString": PLACEHOLDER,
            "Tags": [{"Key": TAG_SCHEDULER, "Value": SCHEDULER}],
        }
    return job


def drop_app_if_too_large(job: BatchJob) -> str:
    """Drop the packed app from a request that exceeds AWS Batch's quota.

    Returns:
        A warning for the user; empty if the request fits.

    Raises:
        ValueError: the job definition is too large.
    """
    text = json.dumps(job.definition)
    size = len(text.encode()) + _CREDENTIALS_SIZE * text.count(PLACEHOLDER)
    if size > _LARGEST_DEFINITION:
        raise ValueError(
            f"the job definition has {size} bytes; AWS Batch takes {_LARGEST_DEFINITION}. Arguments and environments "
            "of all roles are part of it: put the larger ones into the image or into a file that the program reads"
        )
    size = len(json.dumps(job.submit).encode())
    if size <= _LARGEST_SUBMISSION:
        return ""
    job.submit.pop("parameters")
    return (
        f"the app is too large to travel with its job ({size} bytes; AWS Batch takes {_LARGEST_SUBMISSION}): "
        "`describe` in another process will show it as the job definition has it"
    )


def _check(app: AppDef, cfg: AWSBatchOpts) -> None:
    validation.check_names(app)
    if len(app.roles) > _MOST_ROLES:
        raise ValueError(
            f"app {app.name!r} has {len(app.roles)} roles; a job of AWS Batch has at most {_MOST_ROLES} node ranges, "
            "one for each role"
        )
    if cfg.job_type not in ("auto", "multinode", "container"):
        raise ValueError(f"run option job_type is {cfg.job_type!r}; it is auto, multinode or container")
    if cfg.job_type == "container" and not _has_one_replica(app):
        replicas = sum(role.num_replicas for role in app.roles)
        raise ValueError(f"run option job_type is container, which is for one replica; app {app.name!r} has {replicas}")
    if not 0 <= cfg.priority <= 9999:
        raise ValueError(f"run option priority is {cfg.priority}; it is a number from 0 to 9999")
    if cfg.timeout is not None and cfg.timeout < 60:
        raise ValueError(f"run option timeout is {cfg.timeout}; it is a number of seconds, 60 or more")
    if cfg.host_retries < 0:
        raise ValueError(f"run option host_retries is {cfg.host_retries}; it is a number, 0 or more")
    if cfg.secret and not cfg.execution_role_arn:
        raise ValueError("run option secret needs execution_role_arn, a role that may read secrets (GetSecretValue)")


def _has_one_replica(app: AppDef) -> bool:
    return len(app.roles) == 1 and bool(app.roles[0].num_replicas == 1)


def _is_single(app: AppDef, cfg: AWSBatchOpts) -> bool:
    if cfg.job_type != "auto":
        return cfg.job_type == "container"
    return _has_one_replica(app) and container.instance_type(app.roles[0].resource) is None


def _nodes(app: AppDef, containers: list[dict[str, Any]]) -> dict[str, Any]:
    ranges, first = [], 0
    for role, properties in zip(app.roles, containers, strict=True):
        kind = container.instance_type(role.resource)
        if kind is not None:
            properties["instanceType"] = kind
        ranges.append({"targetNodes": f"{first}:{first + role.num_replicas - 1}", "container": properties})
        first += role.num_replicas
    return {"numNodes": first, "mainNode": 0, "nodeRangeProperties": ranges}


def _retries(app: AppDef, cfg: AWSBatchOpts) -> dict[str, Any]:
    """Return Batch's retry strategy. Batch restarts a whole job when its main node has failed, whatever the policy.

    (TorchX's former scheduler used ``max_retries`` as the number of attempts, so that 1 meant no retry.)
    """
    retries = max(role.max_retries for role in app.roles)
    attempts = 1 + (retries or cfg.host_retries)
    if attempts > _MOST_ATTEMPTS:
        what = "max_retries" if retries else "run option host_retries"
        raise ValueError(f"{what} is {attempts - 1}; AWS Batch starts a job again at most {_MOST_ATTEMPTS - 1} times")
    rules = [{"onExitCode": str(NO_RESTART), "action": "EXIT"}]
    if not retries and cfg.host_retries:
        # The instance sends its containers SIGTERM before it shuts down.
        told = {"onExitCode": str(128 + signal.SIGTERM), "action": "RETRY"}
        rules = [{"onStatusReason": "Host EC2*", "action": "RETRY"}, told, {"onReason": "*", "action": "EXIT"}]
    return {"attempts": attempts, **({"evaluateOnExit": rules} if attempts > 1 else {})}


def _tags(app: AppDef, cfg: AWSBatchOpts) -> dict[str, str]:
    """Return the job's tags: TorchX's former ones, the scheduler's name, and the app's metadata within AWS's limits."""
    ours = {
        TAG_VERSION: torchx.__version__,
        TAG_APP: app.name,
        TAG_USER: cfg.user or _user(),
        TAG_SCHEDULER: SCHEDULER,
    }
    theirs = {_safe(name, 128): value for name, value in app.metadata.items() if not name.startswith("aws:")}
    spare = _MOST_TAGS - len(ours)
    return {name: _safe(value, 256) for name, value in (*list(theirs.items())[:spare], *ours.items()) if name}


def _safe(text: str, longest: int) -> str:
    return re.sub(r"[^\w\s.:/=+@-]", "_", str(text))[:longest]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no passwd entry for the user, as in some containers
        return "unknown"


def roles_of(job: Mapping[str, Any]) -> list[Role]:
    """Reconstruct the roles from a job or a job definition, for a job that does not hold its app."""
    nodes = job.get("nodeProperties")
    if nodes:
        return [
            _role(each["container"], _count(each["targetNodes"], nodes["numNodes"]))
            for each in nodes["nodeRangeProperties"]
        ]
    return [_role(job.get("containerProperties") or job.get("container") or {}, 1)]


def _count(target: str, nodes: int) -> int:
    """Return the number of nodes in a range ``2:5``, ``:5``, ``2:`` or ``2`` of a job of ``nodes`` nodes."""
    first, colon, last = target.partition(":")
    return int(last or nodes - 1) - int(first or 0) + 1 if colon else 1


def _role(properties: Mapping[str, Any], replicas: int) -> Role:
    env = {each["name"]: each.get("value", "") for each in properties.get("environment", ())}
    for name in (CREDENTIALS, KEY_VARIABLE):
        env.pop(name, None)
    words = properties.get("command") or [""]
    return Role(
        env.pop(ROLE_NAME, "node"),
        image=properties.get("image", ""),
        entrypoint=words[0],
        args=list(words[1:]),
        env=env,
        num_replicas=replicas,
        resource=container.resource(properties),
    )
