# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""From an app to a job definition of AWS Batch and a job. Pure, and what a dry run shows.

An app of several replicas is one multi-node parallel job, with one node range for each role, so that Batch starts all
of it or nothing. Such a job cannot run on Spot or beside other jobs; so an app of one replica is a plain container job,
unless its resource names an instance type, which only a node range can ask for.
"""

from __future__ import annotations

import getpass
import json
import re
import signal
from collections.abc import Callable, Mapping
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
from torchx_monarch.system.signed_line import KEY_VARIABLE

TAG_VERSION = "torchx.pytorch.org/version"
TAG_APP = "torchx.pytorch.org/app-name"
TAG_USER = "torchx.pytorch.org/user"
TAG_SCHEDULER = "torchx-monarch/scheduler"
"""Which of our schedulers submitted the job; one without it that has the others is from TorchX's own."""

TAG_DELETED = "torchx-monarch/deleted"
"""On jobs that were deleted: Batch itself remembers every job for a week."""

APP_PARAMETER = "torchx-monarch-app"
"""Parameter of the job that holds the app as ``blob.pack`` has it. Parameters reach no container."""

ROLE_NAME = "TORCHX_ROLE_NAME"
"""Variable of each container, as TorchX's scheduler had it; what is known of roles where the app does not fit."""

SECRET_ARN = "(ARN of the secret made when the job is submitted)"
"""Stands for it in a dry run."""

_MOST_ROLES = 5
"""Node ranges of one job."""

_MOST_ATTEMPTS = 10

_LARGEST_DEFINITION = 24 << 10
"""Bytes; AWS Batch's quota for RegisterJobDefinition."""

_LARGEST_SUBMISSION = 30 << 10
"""Bytes; the one for SubmitJob."""

_CREDENTIALS_SIZE = 2048
"""Bytes, at most, of what takes the place of their placeholder."""

_LONGEST_NAME = 128

_MOST_TAGS = 50


@dataclass
class BatchJob:
    """What is asked of AWS.

    Attributes:
        name: of the job and of its definition.
        queue: name of the queue.
        definition: arguments of RegisterJobDefinition.
        submit: arguments of SubmitJob; the revision of the definition is filled in.
        images_to_push: the local images with the repository and the tag that they get.
        secret: arguments of Secrets Manager's CreateSecret; empty for none.
    """

    name: str
    queue: str
    definition: dict[str, Any]
    submit: dict[str, Any]
    images_to_push: dict[str, tuple[str, str]] = field(default_factory=dict)
    secret: dict[str, Any] = field(default_factory=dict)

    @property
    def app_id(self) -> str:
        """QUEUE:NAME, as TorchX's scheduler had it."""
        return f"{self.queue}:{self.name}"

    def __str__(self) -> str:
        """What a dry run shows; the packed app is of no use to a person."""
        shown = asdict(self)
        parameters = shown["submit"].get("parameters", {})
        if APP_PARAMETER in parameters:
            parameters[APP_PARAMETER] = f"(the app, {len(parameters[APP_PARAMETER])} bytes)"
        return str(yaml.safe_dump(json.loads(json.dumps(shown)), sort_keys=False))


def new_name(app_name: str) -> str:
    """A name that no other job has, of the characters that Batch allows."""
    safe = re.sub(r"[^A-Za-z0-9_-]", "-", make_unique(app_name))[-_LONGEST_NAME:]
    return safe.lstrip("-_") or "app"


def queue_name(queue: str) -> str:
    """From a name or an ARN."""
    return queue.rpartition("/")[2]


def render(
    app: AppDef,
    cfg: AWSBatchOpts,
    scheduler: str,
    finish: Callable[[Role, dict[str, str]], None] = lambda role, env: None,
    never_again: tuple[int, ...] = (),
) -> BatchJob:
    """The request for an app.

    Args:
        app: what to run; its images must be where the nodes find them.
        cfg: the run options.
        scheduler: the name of ours that submits it.
        finish: adds to the environment of a role's containers.
        never_again: exit codes after which Batch is not to start the job again.

    Raises:
        ValueError: AWS Batch cannot run it so; the message says what is allowed.
    """
    _check(app, cfg)
    name, queue = new_name(app.name), queue_name(cfg.queue)
    containers, first = [], 0
    for index, role in enumerate(app.roles):
        words, env = command.render(role, f"{queue}:{name}", first)
        env |= {"TORCHX_ROLE_IDX": str(index), ROLE_NAME: role.name, settings.ENV_TORCHX_IMAGE: role.image}
        finish(role, env)
        containers.append(container.properties(role, words, env, cfg))
        first += role.num_replicas
    definition: dict[str, Any] = {"jobDefinitionName": name, "tags": _tags(app, cfg, scheduler)}
    if _is_single(app, cfg):
        definition |= {"type": "container", "platformCapabilities": ["EC2"], "containerProperties": containers[0]}
    else:
        definition |= {"type": "multinode", "nodeProperties": _nodes(app, containers)}
    definition["retryStrategy"] = _retries(app, cfg, never_again)
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
    return BatchJob(name, queue, definition, submit)


def fit(job: BatchJob) -> str:
    """Leave the app out of the request where it is too large for AWS Batch; what is to be said of it, or nothing.

    Raises:
        ValueError: the definition itself is too large.
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


def _retries(app: AppDef, cfg: AWSBatchOpts, never_again: tuple[int, ...]) -> dict[str, Any]:
    """Batch starts all of a job again when its main node has failed, whatever the policy.

    (TorchX's scheduler took ``max_retries`` for the number of attempts, so that 1 meant none.)
    """
    retries = max(role.max_retries for role in app.roles)
    attempts = 1 + (retries or cfg.host_retries)
    if attempts > _MOST_ATTEMPTS:
        what = "max_retries" if retries else "run option host_retries"
        raise ValueError(f"{what} is {attempts - 1}; AWS Batch starts a job again at most {_MOST_ATTEMPTS - 1} times")
    rules = [{"onExitCode": str(code), "action": "EXIT"} for code in never_again]
    if not retries and cfg.host_retries:
        # A machine that is shut down sends SIGTERM before it is gone.
        told = {"onExitCode": str(128 + signal.SIGTERM), "action": "RETRY"}
        rules = [{"onStatusReason": "Host EC2*", "action": "RETRY"}, told, {"onReason": "*", "action": "EXIT"}]
    return {"attempts": attempts, **({"evaluateOnExit": rules} if attempts > 1 and rules else {})}


def _tags(app: AppDef, cfg: AWSBatchOpts, scheduler: str) -> dict[str, str]:
    """Those that TorchX's scheduler gave, and the app's metadata, with what AWS allows in a tag."""
    ours = {
        TAG_VERSION: torchx.__version__,
        TAG_APP: app.name,
        TAG_USER: cfg.user or _user(),
        TAG_SCHEDULER: scheduler,
    }
    theirs = {_safe(name, 128): value for name, value in app.metadata.items() if not name.startswith("aws:")}
    spare = _MOST_TAGS - len(ours)
    return {name: _safe(value, 256) for name, value in (*list(theirs.items())[:spare], *ours.items()) if name}


def _safe(text: str, longest: int) -> str:
    return re.sub(r"[^\w\s.:/=+@-]", "_", str(text))[:longest]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a name for its user
        return "unknown"


def roles_of(job: Mapping[str, Any]) -> list[Role]:
    """The roles as a job definition, or a job, has them: what is known where the app itself is not."""
    nodes = job.get("nodeProperties")
    if nodes:
        return [
            _role(each["container"], _count(each["targetNodes"], nodes["numNodes"]))
            for each in nodes["nodeRangeProperties"]
        ]
    return [_role(job.get("containerProperties") or job.get("container") or {}, 1)]


def _count(target: str, nodes: int) -> int:
    """Nodes of a range ``2:5``, ``:5``, ``2:`` or ``2``."""
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
