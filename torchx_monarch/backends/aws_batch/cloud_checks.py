# SPDX-License-Identifier: BSD-3-Clause
"""Check the credentials and the job queue for ``torchx monarch doctor``."""

from __future__ import annotations

from collections.abc import Iterator

from torchx_monarch.backends.aws_batch.native import Aws
from torchx_monarch.backends.aws_batch.options import AWSBatchOpts
from torchx_monarch.model.check_result import CheckResult, check


def check_cloud(aws: Aws, options: AWSBatchOpts | None) -> Iterator[CheckResult]:
    """Check that jobs can be submitted with run options.

    Args:
        aws: the account and region.
        options: the run options; None to check only the credentials.

    Raises:
        AwsError: AWS is unreachable or refuses.
    """
    identity = aws.call("sts", "GetCallerIdentity")
    yield check("AWS", f"{identity.get('Arn', '')}, region {aws.client('batch').meta.region_name}")
    if options is None:
        return
    queues = aws.call("batch", "DescribeJobQueues", jobQueues=[options.queue]).get("jobQueues") or []
    if not queues:
        advice = "there is no such queue in this account and region; see AWS_PROFILE, AWS_REGION and -cfg queue"
        yield check("queue", options.queue, fail=advice)
        return
    state, status = queues[0].get("state", ""), queues[0].get("status", "")
    usable = state == "ENABLED" and status == "VALID"
    advice = f"it accepts no jobs: {queues[0].get('statusReason') or 'enable it'}; or name another in -cfg queue"
    yield check("queue", f"{options.queue}, {state}, {status}", fail="" if usable else advice)
    if bool(queues[0].get("schedulingPolicyArn")) != bool(options.share_id):
        advice = "the queue has no scheduling policy: leave -cfg share_id out"
        if not options.share_id:
            advice = "the queue has a scheduling policy: name a share in -cfg share_id"
        yield check("share_id", options.share_id or "none", fail=advice)
