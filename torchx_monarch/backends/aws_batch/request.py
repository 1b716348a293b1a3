# SPDX-License-Identifier: BSD-3-Clause
"""The run options and their checks, and the job definition and the job of an app, as a dry run shows them.

An app of several replicas becomes one multi-node parallel job with a node range for each role, so that Batch starts all
nodes or none. Such a job cannot run on Spot or share instances with other jobs. So an app of one replica becomes a
container job, unless its resource names an instance type, which only a node range can request. Options of TorchX's
former aws_batch keep their names.
"""

from __future__ import annotations

import copy
import json
import os
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torchx
import yaml
from torchx import settings
from torchx.schedulers.devices import get_device_mounts
from torchx.schedulers.ids import make_unique
from torchx.specs import AppDef, BindMount, DeviceMount, Role, VolumeMount, macros
from torchx.specs.named_resources_aws import K8S_ITYPE

from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.backends.core.options import NetworkOpts
from torchx_monarch.model.env_names import CREDENTIALS
from torchx_monarch.model.host_result import KEY_VARIABLE
from torchx_monarch.model.role_spec import RetryPolicy, RoleSpec
from torchx_monarch.system.processes import user_name

SCHEDULER = "monarch_aws_batch"
"""The scheduler's registered name."""

TAG_VERSION = "torchx.pytorch.org/version"

TAG_APP = "torchx.pytorch.org/app-name"

TAG_USER = "torchx.pytorch.org/user"

TAG_SCHEDULER = "torchx-monarch/scheduler"
"""Tag with ``SCHEDULER``, by which ``list`` finds its jobs; TorchX's former scheduler set the other tags only."""

TAG_DELETED = "torchx-monarch/deleted"
"""Tag of deleted jobs. Batch itself keeps every job for a week after its end."""

APP_PARAMETER = "torchx-monarch-app"
"""Job parameter that holds the app (``SubmittedApp.pack``). Batch passes parameters to no container."""

SECRET_PREFIX = "torchx-monarch/"
"""Beginning of the names of the secrets that are made for jobs."""

_LATER = "(made when the job is submitted)"
"""The value of the secret until the job is submitted."""

_MAX_ATTEMPTS, _MAX_NAME, _MAX_TAGS = 10, 128, 50

_DEFAULT_LOG_GROUP = "/aws/batch/job"

_PERMISSIONS = {"r": "READ", "w": "WRITE", "m": "MKNOD"}

RANK0 = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"
"""Batch's variable with the address of the main node (replica 0 of the first role); Batch leaves it unset there."""

_REPLICA = "TORCHX_REPLICA_ID"
"""The shell variable that holds the replica number."""

_UNKNOWN = "\0"
"""Placeholder for the replica number. No argument and no environment variable can contain a null character."""


@dataclass(kw_only=True)
class AWSBatchOpts(NetworkOpts):
    queue: str
    """The job queue, by name or ARN. Jobs of several nodes need EC2 on-demand instances: not Fargate, not Spot. (This
    scheduler is experimental: tested with moto, and not on AWS itself.)"""

    user: str | None = None
    """The user name to tag the job with. Default: your user name."""

    image_repo: str | None = None
    """The image repository to which images with your workspace are pushed; you need push access."""

    privileged: bool = False
    """Run the containers with elevated permissions, as `docker run --privileged` does."""

    share_id: str | None = None
    """The share identifier of the job; needed if, and only if, the queue has a scheduling policy."""

    priority: int = 0
    """Priority within share_id, 0 to 9999, higher first; only for queues with a scheduling policy."""

    job_role_arn: str | None = None
    """ARN of the IAM role whose permissions the containers have."""

    execution_role_arn: str | None = None
    """ARN of the IAM role with which ECS pulls images, writes logs and reads secrets."""

    ulimits: list[str] | None = None
    """Limits of the containers, each NAME:SOFT:HARD, with commas between them; -1 for no limit (memlock:-1:-1)."""

    job_type: str = "auto"
    """`multinode` or `container`. `auto` is `container` for an app of one replica whose resource names no instance
    type, else `multinode`. Only a container job can run on Spot and share an instance with other jobs; only a multinode
    job can choose its instance type."""

    timeout: int | None = None
    """Seconds after which Batch ends an attempt, 60 or more. Default: no limit."""

    log_group: str | None = None
    """The CloudWatch log group, which must exist. Default: /aws/batch/job."""

    grace: int = 25
    """Seconds between SIGTERM and SIGKILL when ranks are ended. ECS kills a container 30 s after its SIGTERM, unless
    the instances set ECS_CONTAINER_STOP_TIMEOUT."""

    secret: bool = False
    """Pass the job's credentials to its hosts through AWS Secrets Manager. Otherwise they are in the job definition,
    visible to every user who may describe jobs. Needs execution_role_arn."""


def check_options(options: AWSBatchOpts) -> None:
    checks = (
        (options.job_type in ("auto", "multinode", "container"), "job_type", "auto, multinode or container"),
        (0 <= options.priority <= 9999, "priority", "a number from 0 to 9999"),
        (options.timeout is None or options.timeout >= 60, "timeout", "a number of seconds, 60 or more"),
    )
    for is_allowed, name, allowed in checks:
        if not is_allowed:
            raise UserError(f"run option {name} is {options[name]!r}; it is {allowed}")
    if options.secret and not options.execution_role_arn:
        raise UserError("run option secret needs execution_role_arn, a role that may read secrets (GetSecretValue)")


def check_app(app: AppDef, roles: Sequence[RoleSpec], options: AWSBatchOpts) -> None:
    replicas = sum(role.replicas for role in roles)
    if options.job_type == "container" and replicas != 1:
        raise UserError(f"run option job_type is container, which is for one replica; app {app.name!r} has {replicas}")
    for role in roles:
        if role.spares:
            raise UserError(
                f"role {role.name!r} has spare hosts, and a job of AWS Batch ends when it loses a node: leave them out"
            )
        if role.runs_hosts and role.replicas > 1 and role.max_retries and role.retry_policy is RetryPolicy.REPLICA:
            raise UserError(
                f"role {role.name!r} has RetryPolicy.REPLICA, and AWS Batch replaces no single node: it starts a job "
                "again as a whole (RetryPolicy.APPLICATION)"
            )


@dataclass
class BatchJob:
    """The request for one app.

    Attributes:
        name: name of the job and of its definition.
        definition: arguments of RegisterJobDefinition.
        submit: arguments of SubmitJob but the app itself; ``jobDefinition`` becomes the ARN of the registered revision
            when the job is submitted.
        secret: arguments of Secrets Manager's CreateSecret; empty for no secret.
    """

    name: str
    queue: str
    definition: dict[str, Any]
    submit: dict[str, Any]
    secret: dict[str, Any] = field(default_factory=dict)

    @property
    def app_id(self) -> str:
        """The app's id, QUEUE:NAME, as in TorchX's former scheduler."""
        return f"{self.queue}:{self.name}"

    def __str__(self) -> str:
        return str(yaml.safe_dump(json.loads(json.dumps(asdict(self))), sort_keys=False))


def new_name(app_name: str) -> str:
    """Return a unique job name of the characters that Batch allows."""
    safe = re.sub(r"[^A-Za-z0-9_-]", "-", make_unique(app_name))[-_MAX_NAME:]
    return safe.lstrip("-_") or "app"


def queue_name(queue: str) -> str:
    """Return the name of a queue from its name or ARN."""
    return queue.rpartition("/")[2]


def render(app: AppDef, roles: Sequence[RoleSpec], cfg: AWSBatchOpts) -> BatchJob:
    """Return the request for an app that ``options.check_app`` allows."""
    name, queue = new_name(app.name), queue_name(cfg.queue)
    key, tags = secrets.token_hex(), _tags(app, cfg)
    ranges: list[dict[str, Any]] = []
    first = 0
    for index, (role, spec) in enumerate(zip(app.roles, roles, strict=True)):
        words, env = render_command(role, f"{queue}:{name}", first)
        env |= {"TORCHX_ROLE_IDX": str(index), "TORCHX_ROLE_NAME": role.name, settings.ENV_TORCHX_IMAGE: role.image}
        if spec.runs_hosts:
            env.pop(CREDENTIALS, None)
            env[KEY_VARIABLE] = key
        nodes = f"{first}:{first + role.num_replicas - 1}"
        ranges.append({"targetNodes": nodes, "container": _container(role, words, env, cfg)})
        first += role.num_replicas
    # That of a named resource, such as ``aws_p4d.24xlarge``.
    instance_types = [role.resource.capabilities.get(K8S_ITYPE) for role in app.roles]
    definition: dict[str, Any] = {"jobDefinitionName": name, "tags": tags, "retryStrategy": _retries(app)}
    if cfg.job_type == "container" or (cfg.job_type == "auto" and first == 1 and not instance_types[0]):
        properties = ranges[0]["container"]
        definition |= {"type": "container", "platformCapabilities": ["EC2"], "containerProperties": properties}
    else:
        for node_range, instance_type in zip(ranges, instance_types, strict=True):
            if instance_type:
                node_range["container"]["instanceType"] = instance_type
        properties = {"numNodes": first, "mainNode": 0, "nodeRangeProperties": ranges}
        definition |= {"type": "multinode", "nodeProperties": properties}
    if cfg.timeout is not None:
        definition["timeout"] = {"attemptDurationSeconds": cfg.timeout}
    submit: dict[str, Any] = {"jobName": name, "jobQueue": cfg.queue, "jobDefinition": name, "tags": dict(tags)}
    if cfg.share_id is not None:
        submit["shareIdentifier"] = cfg.share_id
        definition["schedulingPriority"] = cfg.priority
    job = BatchJob(name, queue, definition, submit)
    if cfg.secret and roles[0].runs_hosts:
        job.secret = {
            "Name": f"{SECRET_PREFIX}{name}",
            "Description": f"Credentials of the hosts of the AWS Batch job {name}; removed by torchx delete",
            "SecretString": _LATER,
            "Tags": [{"Key": TAG_SCHEDULER, "Value": SCHEDULER}],
        }
    return job


def _container(role: Role, command: list[str], env: Mapping[str, str], cfg: AWSBatchOpts) -> dict[str, Any]:
    amounts = {"VCPU": max(1, role.resource.cpu), "MEMORY": role.resource.memMB, "GPU": max(0, role.resource.gpu)}
    mounts = [*role.mounts, *get_device_mounts(role.resource.devices)]
    storage = [(f"mount_{index}", mount) for index, mount in enumerate(mounts) if not isinstance(mount, DeviceMount)]
    optional = {
        "ulimits": _ulimits(cfg.ulimits or []),
        "jobRoleArn": cfg.job_role_arn,
        "executionRoleArn": cfg.execution_role_arn,
    }
    return {
        "image": role.image,
        "command": command,
        "environment": [{"name": name, "value": value} for name, value in env.items()],
        "privileged": cfg.privileged,
        "resourceRequirements": [{"type": kind, "value": str(amount)} for kind, amount in amounts.items() if amount],
        "linuxParameters": {
            # The kernel discards signals, SIGTERM among them, that process 1 of a container has no handler for.
            "initProcessEnabled": True,
            # Data loaders need more than 64 MB of shared memory, the usual size in a container.
            "sharedMemorySize": role.resource.memMB,
            "devices": [_device(mount) for mount in mounts if isinstance(mount, DeviceMount)],
        },
        "logConfiguration": {
            "logDriver": "awslogs",
            **({"options": {"awslogs-group": cfg.log_group}} if cfg.log_group else {}),
        },
        "volumes": [{"name": name, **_volume(mount)} for name, mount in storage],
        "mountPoints": [
            {"sourceVolume": name, "containerPath": mount.dst_path, "readOnly": mount.read_only}
            for name, mount in storage
        ],
        **{name: value for name, value in optional.items() if value},
    }


def _device(mount: DeviceMount) -> dict[str, Any]:
    permissions = [_PERMISSIONS.get(letter, letter) for letter in mount.permissions]  # Batch refuses others
    return {"hostPath": mount.src_path, "containerPath": mount.dst_path, "permissions": permissions}


def _volume(mount: BindMount | VolumeMount) -> dict[str, Any]:
    """Return a volume: a host's folder, or an EFS file system (``fs-12345678``, ``fs-12345678:/folder``)."""
    if isinstance(mount, BindMount):
        return {"host": {"sourcePath": mount.src_path}}
    system, _, folder = mount.src.partition(":")
    return {"efsVolumeConfiguration": {"fileSystemId": system, **({"rootDirectory": folder} if folder else {})}}


def _ulimits(texts: list[str]) -> list[dict[str, Any]]:
    limits = []
    for text in filter(None, (ulimit.strip() for ulimit in texts)):
        found = re.fullmatch(r"([^:]+):(-?\d+):(-?\d+)", text)
        if found is None:
            raise UserError(f"run option ulimits: {text!r} is not NAME:SOFT:HARD, such as memlock:-1:-1")
        limits.append({"name": found[1], "softLimit": int(found[2]), "hardLimit": int(found[3])})
    return limits


def render_command(role: Role, app_id: str, first: int) -> tuple[list[str], dict[str, str]]:
    """Return the words of a role's command, and its environment; ``first`` is the node index of its replica 0."""
    number = "0" if role.num_replicas == 1 else _UNKNOWN
    applied = macros.Values(img_root="", app_id=app_id, replica_id=number, rank0_env=RANK0).apply(role)
    words, env = [applied.entrypoint, *applied.args], dict(applied.env)
    late = {name: value for name, value in env.items() if _UNKNOWN in value}
    if not late and not any(_UNKNOWN in word for word in words):
        return words, env
    lines = [f"{_REPLICA}=$((${{AWS_BATCH_JOB_NODE_INDEX:-{first}}} - {first}))"]
    for name, value in late.items():
        lines.append(f"export {name}={_quoted(value)}")
        del env[name]
    lines.append("exec " + " ".join(map(_quoted, words)))
    return ["sh", "-c", "\n".join(lines)], env


def _quoted(text: str) -> str:
    """Quote a text as one shell word, with the placeholder replaced by the shell variable."""
    return f'"${_REPLICA}"'.join(shlex.quote(part) if part else "" for part in text.split(_UNKNOWN)) or "''"


def with_credentials(job: BatchJob, main: RoleSpec, value: str) -> dict[str, Any]:
    """Return a copy of a job definition whose hosts receive their credentials, or the ARN of the secret with them."""
    definition = copy.deepcopy(job.definition)
    where, key = ("secrets", "valueFrom") if job.secret else ("environment", "value")
    if main.runs_hosts:
        _main_container(definition).setdefault(where, []).append({"name": CREDENTIALS, key: value})
    return definition


def _retries(app: AppDef) -> dict[str, Any]:
    """Return Batch's retry strategy. Batch restarts a whole job when its main node has failed, whatever the policy."""
    retries = max(role.max_retries for role in app.roles)
    if retries >= _MAX_ATTEMPTS:
        raise UserError(f"max_retries is {retries}; AWS Batch starts a job again at most {_MAX_ATTEMPTS - 1} times")
    if not retries:
        return {"attempts": 1}
    no_restart = {"onExitCode": str(os.EX_CONFIG), "action": "EXIT"}  # a program asks for none
    return {"attempts": 1 + retries, "evaluateOnExit": [no_restart]}


def _tags(app: AppDef, cfg: AWSBatchOpts) -> dict[str, str]:
    """Return the job's tags: TorchX's former ones, the scheduler's name, and the app's metadata within AWS's limits."""
    own_tags = {
        TAG_VERSION: torchx.__version__,
        TAG_APP: app.name,
        TAG_USER: cfg.user or user_name(),
        TAG_SCHEDULER: SCHEDULER,
    }
    app_tags = {_safe(name, 128): value for name, value in app.metadata.items() if not name.startswith("aws:")}
    spare = _MAX_TAGS - len(own_tags)
    return {name: _safe(value, 256) for name, value in (*list(app_tags.items())[:spare], *own_tags.items()) if name}


def _safe(text: str, size: int) -> str:
    return re.sub(r"[^\w\s.:/=+@-]", "_", str(text))[:size]


def _main_container(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the container properties of the main node, from Batch's description of a job or of its definition."""
    if nodes := job.get("nodeProperties"):
        found: dict[str, Any] = nodes["nodeRangeProperties"][0]["container"]
        return found
    return job.get("containerProperties") or job.get("container") or {}


def result_key(job: Mapping[str, Any]) -> str:
    """Return the key with which the hosts of a job sign their results; empty if none runs hosts."""
    variables = _main_container(job).get("environment", ())
    return next((variable.get("value", "") for variable in variables if variable["name"] == KEY_VARIABLE), "")


def secrets_of(job: Mapping[str, Any]) -> list[str]:
    """Return the ARNs of the secrets that were made for the credentials of a job's hosts."""
    secrets = _main_container(job).get("secrets", ())
    arns = [secret["valueFrom"] for secret in secrets if secret["name"] == CREDENTIALS]
    return [arn for arn in arns if f":{SECRET_PREFIX}" in arn]


def log_group(job: Mapping[str, Any]) -> str:
    properties = _main_container(job)
    return str(properties.get("logConfiguration", {}).get("options", {}).get("awslogs-group", _DEFAULT_LOG_GROUP))
