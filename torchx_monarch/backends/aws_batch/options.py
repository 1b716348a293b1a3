# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The run options; those that TorchX's aws_batch had keep their names."""

from __future__ import annotations

from dataclasses import dataclass

from torchx.schedulers.api import StructuredOpts


@dataclass
class AWSBatchOpts(StructuredOpts):  # type: ignore[misc]
    """Run options of ``aws_batch``."""

    queue: str
    """The job queue, by name or ARN. Jobs of several nodes need EC2 on-demand instances: not Fargate, not Spot."""

    user: str | None = None
    """The user name to tag the job with; yours if not given."""

    image_repo: str | None = None
    """The image repository to push images with your workspace to; you must have push access."""

    privileged: bool = False
    """Run the containers with elevated permissions, as `docker run --privileged` does."""

    share_id: str | None = None
    """The share identifier of the job; needed if, and only if, the queue has a scheduling policy."""

    priority: int = 0
    """Priority within share_id, 0 to 9999, higher first; heeded by queues with a scheduling policy."""

    job_role_arn: str | None = None
    """ARN of the IAM role whose permissions the containers have."""

    execution_role_arn: str | None = None
    """ARN of the IAM role with which ECS pulls images, writes logs and reads secrets."""

    ulimits: list[str] | None = None
    """Limits of the containers, each NAME:SOFT:HARD, with commas between them; -1 for no limit (memlock:-1:-1)."""

    job_type: str = "auto"
    """`multinode` or `container`; `auto`: `container` for an app of one replica whose resource names no instance type.
    Only a container job can run on Spot and beside others; only a multinode one can choose its instance type."""

    timeout: int | None = None
    """Seconds after which Batch ends an attempt, 60 or more."""

    host_retries: int = 0
    """How often the job is started again when AWS takes an instance away (Spot), where no role has max_retries; with
    max_retries this counts as any other failure."""

    log_group: str | None = None
    """The CloudWatch log group, which must exist; /aws/batch/job if not given."""


@dataclass
class MonarchAWSBatchOpts(AWSBatchOpts):
    """What ``monarch_aws_batch`` has beside them."""

    grace: int = 25
    """Seconds that ranks have between SIGTERM and SIGKILL. ECS kills a container 30 s after its SIGTERM, unless
    ECS_CONTAINER_STOP_TIMEOUT of the instances says otherwise."""

    secret: bool = False
    """Hand the job's credentials to its hosts through AWS Secrets Manager, not in the job definition, where whoever may
    describe jobs sees them. Needs execution_role_arn."""
