# SPDX-License-Identifier: BSD-3-Clause
"""The run options. Options that TorchX's former aws_batch had keep their names."""

from __future__ import annotations

from dataclasses import dataclass

from torchx_monarch.backends.core.options import NetworkOpts


@dataclass(kw_only=True)
class AWSBatchOpts(NetworkOpts):
    """Run options of monarch_aws_batch."""

    queue: str
    """The job queue, by name or ARN. Jobs of several nodes need EC2 on-demand instances: not Fargate, not Spot."""

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

    host_retries: int = 0
    """How often the job is restarted after AWS has reclaimed an instance (Spot), if no role has max_retries. With
    max_retries, such an end counts as any other failure."""

    log_group: str | None = None
    """The CloudWatch log group, which must exist. Default: /aws/batch/job."""

    grace: int = 25
    """Seconds between SIGTERM and SIGKILL when ranks are ended. ECS kills a container 30 s after its SIGTERM, unless
    the instances set ECS_CONTAINER_STOP_TIMEOUT."""

    secret: bool = False
    """Pass the job's credentials to its hosts through AWS Secrets Manager. Otherwise they are in the job definition,
    visible to every user who may describe jobs. Needs execution_role_arn."""
