# SPDX-License-Identifier: BSD-3-Clause
"""The run options and their checks. Options of TorchX's former aws_batch keep their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchx.specs import AppDef

from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.backends.core.options import NetworkOpts
from torchx_monarch.model.role_spec import RetryPolicy, RoleSpec


@dataclass(kw_only=True)
class AWSBatchOpts(NetworkOpts):
    """Run options of monarch_aws_batch."""

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
    """Raise UserError for a run option whose value is not allowed."""
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
    """Raise UserError for an app that Batch cannot run."""
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
