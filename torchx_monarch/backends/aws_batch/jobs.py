# SPDX-License-Identifier: BSD-3-Clause
"""Submit, find, end and remove jobs of AWS Batch, with their job definitions and secrets."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchx_monarch.backends.aws_batch import request
from torchx_monarch.backends.aws_batch.native import Aws, AwsError
from torchx_monarch.backends.aws_batch.request import BatchJob, secrets_of
from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.backends.core.submitted_app import SubmittedApp

_MAX_DESCRIBED = 100
"""Jobs in one DescribeJobs request, by Batch's documentation."""

_MAX_SUBMISSION = 30 << 10
"""AWS Batch's quota for a SubmitJob request, in bytes."""

_log = logging.getLogger("torchx_monarch")


class Jobs:
    """The jobs of an account and region."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws
        self._ids: dict[str, str] = {}

    def submit(self, job: BatchJob, submitted: SubmittedApp, credentials: str) -> None:
        """Submit a job that holds its app, unless that is too large."""
        if job.app_id in self._ids:
            raise UserError(f"this request was submitted already, as {job.app_id}; another job needs another dry run")
        arguments = _with_app(job.submit, submitted)
        with contextlib.ExitStack() as undo:
            if job.secret:
                secret = {**job.secret, "SecretString": credentials}
                credentials = self._aws.call("secretsmanager", "CreateSecret", **secret)["ARN"]
                undo.callback(self._delete_secret, credentials)
            definition = request.with_credentials(job, submitted.roles, credentials)
            made = self._aws.call("batch", "RegisterJobDefinition", **definition)["jobDefinitionArn"]
            undo.callback(self._quietly, "batch", "DeregisterJobDefinition", jobDefinition=made)
            answer = self._aws.call("batch", "SubmitJob", **{**arguments, "jobDefinition": made})
            undo.pop_all()
        self._ids[job.app_id] = answer["jobId"]

    def find(self, app_id: str) -> Mapping[str, Any] | None:
        """Return Batch's description of an app's job, or of its definition if Batch has forgotten the job.

        None stands for an app that does not exist or was deleted.
        """
        queue, _, name = app_id.rpartition(":")
        if not queue or not name:
            return None
        if app_id not in self._ids:
            by_name = [{"name": "JOB_NAME", "values": [name]}]
            for summary in self._summaries(queue, by_name):
                if summary["jobName"] == name:  # the filter ignores case
                    self._ids[app_id] = summary["jobId"]
        if app_id not in self._ids:
            return next(iter(self._definitions(app_id)), None)
        found = self._described([self._ids[app_id]])
        return found[0] if found and request.TAG_DELETED not in found[0].get("tags", {}) else None

    def nodes(self, job: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
        """Return Batch's description of each node of a job that Batch knows, by node index."""
        if "jobId" not in job:
            return {}
        if "nodeProperties" not in job:
            return {0: job}
        ids = [f"{job['jobId']}#{index}" for index in range(job["nodeProperties"]["numNodes"])]
        return {int(node["jobId"].rpartition("#")[2]): node for node in self._described(ids) if "#" in node["jobId"]}

    def queues(self) -> list[str]:
        """Return the names of all queues."""
        pages = self._aws.pages("batch", "DescribeJobQueues")
        return [queue["jobQueueName"] for page in pages for queue in page["jobQueues"]]

    def in_queue(self, queue: str) -> Iterator[dict[str, Any]]:
        """Yield the jobs of a queue that this scheduler submitted, by their tags, which only DescribeJobs returns.

        (TorchX's former scheduler examined the first hundred jobs only.)
        """
        ids = []
        # Without a filter, ListJobs returns running jobs only.
        for summary in self._summaries(queue, [{"name": "AFTER_CREATED_AT", "values": ["1"]}]):
            # This scheduler gives each job a definition of the same name. Other jobs need no DescribeJobs.
            own_definition = f"job-definition/{summary['jobName']}:"
            if own_definition in summary.get("jobDefinition", own_definition):
                ids.append(summary["jobId"])
        for job in self._described(ids):
            tags = job.get("tags", {})
            if tags.get(request.TAG_SCHEDULER) == request.SCHEDULER and request.TAG_DELETED not in tags:
                yield job

    def end(self, job: Mapping[str, Any], reason: str) -> None:
        """Have Batch end a job, in whatever state it is, and return without waiting."""
        self._aws.call("batch", "TerminateJob", jobId=job["jobId"], reason=reason)

    def remove(self, app_id: str, job: Mapping[str, Any]) -> None:
        """Deregister the definition of a job, delete its secret and tag the job as deleted.

        Batch itself keeps jobs for a week. Logs stay in CloudWatch for the retention time of the log group.
        """
        secrets = dict.fromkeys(secrets_of(job))
        for definition in self._definitions(app_id):
            secrets |= dict.fromkeys(secrets_of(definition))
            self._aws.call("batch", "DeregisterJobDefinition", jobDefinition=definition["jobDefinitionArn"])
        if "jobArn" in job:
            self._quietly("batch", "TagResource", resourceArn=job["jobArn"], tags={request.TAG_DELETED: "true"})
        for secret in secrets:
            self._delete_secret(secret)

    def _summaries(self, queue: str, filters: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for page in self._aws.pages("batch", "ListJobs", jobQueue=queue, filters=filters):
            yield from page["jobSummaryList"]

    def _described(self, ids: Sequence[str]) -> list[dict[str, Any]]:
        found = []
        for start in range(0, len(ids), _MAX_DESCRIBED):
            found += self._aws.call("batch", "DescribeJobs", jobs=list(ids[start : start + _MAX_DESCRIBED]))["jobs"]
        return found

    def _definitions(self, app_id: str) -> list[dict[str, Any]]:
        """Return Batch's description of the job definitions of an app that was not deleted."""
        name = app_id.rpartition(":")[2]
        if not re.fullmatch(r"[\w-]+", name, re.ASCII):
            return []
        pages = self._aws.pages("batch", "DescribeJobDefinitions", jobDefinitionName=name, status="ACTIVE")
        found = [definition for page in pages for definition in page["jobDefinitions"]]
        return [definition for definition in found if request.TAG_VERSION in definition.get("tags", {})]

    def _quietly(self, service: str, operation: str, **arguments: Any) -> None:
        """Send a request; log a warning if it fails."""
        try:
            self._aws.call(service, operation, **arguments)
        except AwsError as error:
            _log.warning("%s", error)

    def _delete_secret(self, secret: str) -> None:
        self._quietly("secretsmanager", "DeleteSecret", SecretId=secret, ForceDeleteWithoutRecovery=True)


def _with_app(arguments: Mapping[str, Any], submitted: SubmittedApp) -> dict[str, Any]:
    """Return the arguments of SubmitJob with the app among the job's parameters, unless that exceeds Batch's quota."""
    complete = {**arguments, "parameters": {**arguments.get("parameters", {}), request.APP_PARAMETER: submitted.pack()}}
    size = len(json.dumps(complete).encode())
    if size <= _MAX_SUBMISSION:
        return complete
    _log.warning(
        f"the app is too large to travel with its job ({size} bytes; AWS Batch takes {_MAX_SUBMISSION}): `describe` "
        "will show it as the job definition has it"
    )
    return dict(arguments)
