# SPDX-License-Identifier: BSD-3-Clause
"""Run an app as one job of AWS Batch, with boto3's credentials and region.

Experimental: tested with moto and a stand-in for what it lacks, and not on AWS itself.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import boto3
from botocore import exceptions, xform_name
from botocore.config import Config
from torchx.specs import AppDef
from torchx.workspace.docker_workspace import DockerWorkspaceMixin

from torchx_monarch.backends.aws_batch import request, snapshot
from torchx_monarch.backends.aws_batch.request import AWSBatchOpts, BatchJob, check_app, check_options
from torchx_monarch.backends.aws_batch.snapshot import AwsSnapshot, Results
from torchx_monarch.backends.core.backend import Backend, Capabilities, Cfg, CheckResult, LogQuery
from torchx_monarch.backends.core.errors import BackendError, SubmittedAlreadyError
from torchx_monarch.backends.core.snapshot import Outcome, TimedLines
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.model.host_result import verified
from torchx_monarch.model.state import State

_MAX_DESCRIBED = 100
"""Jobs in one DescribeJobs request, by Batch's documentation."""

POLL = 2.0
"""Seconds between two polls of a followed log. CloudWatch itself lags by some seconds."""

_DELAY = 5.0
"""Seconds after a job's end in which CloudWatch may still receive its last lines."""

_log = logging.getLogger("torchx_monarch")


class AwsError(BackendError):
    """Raised when AWS is unreachable or refuses a request.

    Attributes:
        code: AWS's error code; empty without an answer.
    """

    def __init__(self, error: Exception) -> None:
        """Take over botocore's text, which names the request and the reason, in one line."""
        super().__init__(f"AWS: {' '.join(str(error).split())}")
        self.code: str = getattr(error, "response", {}).get("Error", {}).get("Code", "")


class Aws:
    """Sends requests with the account and region of the environment and AWS's configuration; raises ``AwsError``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._session: Any = None
        self._clients: dict[str, Any] = {}

    def client(self, service: str) -> Any:
        with self._lock:
            if service not in self._clients:
                options: dict[str, Any] = {"user_agent_extra": "torchx-monarch"}
                if "AWS_MAX_ATTEMPTS" not in os.environ:
                    # boto3 waits up to 20 s between two attempts at a request that AWS throttles or fails.
                    options["retries"] = {"mode": "standard", "total_max_attempts": 8}
                try:
                    # Not boto3's default session, which other code in this process shares.
                    # boto3 ignores AWS_REGION, which the AWS CLI and other SDKs read first.
                    region = os.environ.get("AWS_REGION") or None
                    self._session = self._session or boto3.session.Session(region_name=region)
                    self._clients[service] = self._session.client(service, config=Config(**options))
                except (exceptions.BotoCoreError, ValueError) as error:
                    raise AwsError(error) from None
            return self._clients[service]

    def call(self, service: str, operation: str, **arguments: Any) -> dict[str, Any]:
        """Send a request, such as ``SubmitJob`` to ``batch``, and return the answer."""
        client = self.client(service)
        try:
            answer: dict[str, Any] = getattr(client, xform_name(operation))(**arguments)
        except (exceptions.BotoCoreError, exceptions.ClientError) as error:
            raise AwsError(error) from None
        return answer

    def each(self, operation: str, field: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        """Send a request to ``batch``, for one page after the other, and yield what the answers have in a field."""
        pages = self.client("batch").get_paginator(xform_name(operation)).paginate(**arguments)
        try:
            yield from pages.search(f"{field}[]")
        except (exceptions.BotoCoreError, exceptions.ClientError) as error:
            raise AwsError(error) from None

    def close(self) -> None:
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()


class AWSBatchBackend(Backend[AWSBatchOpts, BatchJob, AwsSnapshot]):
    """Runs each replica as a node of a job.

    Batch ends a job with its main node, and restarts all nodes or none. Methods that send requests raise ``AwsError``.
    """

    options = AWSBatchOpts
    capabilities = Capabilities(
        limits_resources=True,
        one_host_role=True,
        kills=False,
        separate_streams=False,
        needs_image=True,
    )
    poll = POLL

    def __init__(self) -> None:
        self.workspace = DockerWorkspaceMixin()
        self._aws = Aws()
        self._job_ids: dict[str, str] = {}
        """Batch's ids of the jobs of the apps that were submitted or found here, by app id."""

    def close(self) -> None:
        self._aws.close()

    # -- submitting ----------------------------------------------------------------------------------------------------

    def checks(self, options: AWSBatchOpts) -> Iterable[CheckResult]:
        identity = self._aws.call("sts", "GetCallerIdentity")
        where = f"{identity['Arn']}, region {self._aws.client('batch').meta.region_name}"
        return [CheckResult("AWS", where)]

    def check_options(self, options: AWSBatchOpts) -> None:
        check_options(options)

    def replica0_host(self, app: AppDef, role: int) -> str:
        """Return ``@VARIABLE`` with the main node's address: Batch gives the nodes no other node's."""
        return f"@{request.RANK0}"

    def render(self, app: AppDef, submitted: SubmittedApp, options: AWSBatchOpts) -> BatchJob:
        check_app(app, submitted.roles, options)
        return request.render(app, submitted.roles, options)

    def submit(self, job: BatchJob, submitted: SubmittedApp, credentials: str) -> str:
        if job.app_id in self._job_ids:
            raise SubmittedAlreadyError(job.app_id)
        arguments = copy.deepcopy(job.submit)
        arguments.setdefault("parameters", {})[request.APP_PARAMETER] = submitted.pack()
        with contextlib.ExitStack() as undo:
            if job.secret:
                secret = {**job.secret, "SecretString": credentials}
                credentials = self._aws.call("secretsmanager", "CreateSecret", **secret)["ARN"]
                undo.callback(self._delete_secret, credentials)
            definition = request.with_credentials(job, submitted.roles[0], credentials)
            made = self._aws.call("batch", "RegisterJobDefinition", **definition)["jobDefinitionArn"]
            undo.callback(self._quietly, "batch", "DeregisterJobDefinition", jobDefinition=made)
            answer = self._aws.call("batch", "SubmitJob", **{**arguments, "jobDefinition": made})
            undo.pop_all()
        self._job_ids[job.app_id] = answer["jobId"]
        return job.app_id

    # -- reading -------------------------------------------------------------------------------------------------------

    def snapshot(self, app_id: str, *, brief: bool = False) -> AwsSnapshot | None:
        job = self._find(app_id)
        if job is None:
            return None
        nodes = self._nodes(job)
        has_ended = snapshot.state(job).is_terminal
        return snapshot.app_snapshot(app_id, job, nodes, self._results(job, nodes) if has_ended and not brief else {})

    def _find(self, app_id: str) -> Mapping[str, Any] | None:
        """Return Batch's description of an app's job, or of its definition if Batch has forgotten the job.

        A job that another scheduler has submitted to the queue is not found.
        """
        queue, _, name = app_id.rpartition(":")
        if not queue or not name:
            return None
        if app_id not in self._job_ids:
            for summary in self._summaries(queue, "JOB_NAME", name):
                if summary["jobName"] == name:  # the filter ignores case
                    self._job_ids[app_id] = summary["jobId"]
        if app_id not in self._job_ids:
            return next(iter(self._definitions(app_id)), None)
        found = self._described([self._job_ids[app_id]])
        return found[0] if found and _is_app(found[0]) else None

    def _nodes(self, job: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
        if "jobId" not in job:
            return {}
        if "nodeProperties" not in job:
            return {0: job}
        ids = [f"{job['jobId']}#{index}" for index in range(job["nodeProperties"]["numNodes"])]
        return {int(node["jobId"].rpartition("#")[2]): node for node in self._described(ids) if "#" in node["jobId"]}

    def _results(self, job: Mapping[str, Any], nodes: Mapping[int, Mapping[str, Any]]) -> Results:
        """Read the result of the main node's host, and of the node that failed first if the main node has none."""
        key, results = request.result_key(job), dict[int, list[str]]()
        for index in dict.fromkeys((0, snapshot.first_failed(nodes))):
            if key and index in nodes and not any(map(any, results.values())):
                streams = snapshot.streams(job, nodes[index])
                results[index] = [self._last_result(stream, key) for stream in streams]
        return results

    def snapshots(self, options: Cfg) -> list[AwsSnapshot]:
        """Read the apps of the queue in ``options``, or of all queues, without the nodes."""
        if chosen := options.get("queue"):
            queues = [request.queue_name(str(chosen))]
        else:
            queues = [queue["jobQueueName"] for queue in self._aws.each("DescribeJobQueues", "jobQueues")]
        return [
            snapshot.app_snapshot(f"{queue}:{job['jobName']}", job, {}, {})
            for queue in queues
            for job in self._jobs_in(queue)
        ]

    def _jobs_in(self, queue: str) -> list[dict[str, Any]]:
        """Return the jobs of a queue that this scheduler submitted, by their tags, which only DescribeJobs returns."""
        ids = []
        # Without a filter, ListJobs returns running jobs only.
        for summary in self._summaries(queue, "AFTER_CREATED_AT", "1"):
            # This scheduler gives each job a definition of the same name. Other jobs need no DescribeJobs.
            own_definition = f"job-definition/{summary['jobName']}:"
            if own_definition in summary.get("jobDefinition", own_definition):
                ids.append(summary["jobId"])
        return [job for job in self._described(ids) if _is_app(job)]

    def read_log(self, app: AwsSnapshot, role: str, replica: int, query: LogQuery[AwsSnapshot]) -> Iterator[TimedLines]:
        index = [(node.role, node.id) for node in app.replicas].index((role, replica))
        window: dict[str, int] = {}
        if query.since is not None:
            window["startTime"] = int(query.since.timestamp() * 1000)
        if query.until is not None:
            window["endTime"] = int(query.until.timestamp() * 1000) + 1  # GetLogEvents excludes endTime itself
        at, token = 0, ""
        for _ in query.reads(POLL, _DELAY):
            latest = query.latest() if query.follow else app
            found = snapshot.streams(latest.job, latest.nodes.get(index, {})) if latest else []
            while at < len(found):
                before = token
                page, token = self._page(found[at], token, window, query.tail)
                yield from page
                # An empty page is not the end. At the end, GetLogEvents returns the token of the request.
                if token == before:
                    if at + 1 == len(found):
                        break
                    at, token = at + 1, ""

    def _page(
        self, stream: tuple[str, str], token: str, window: dict[str, int], tail: int
    ) -> tuple[list[TimedLines], str]:
        more: dict[str, Any] = {"startFromHead": True, **window}
        if token:
            more["nextToken"] = token
        elif tail:
            more.update({"startFromHead": False, "limit": min(tail, 10_000)})  # what one request returns at most
        try:
            answer = self._log_events(stream, **more)
        except AwsError as error:
            if error.code == "ResourceNotFoundException":
                return [], token  # the stream does not exist before its first line
            raise
        page = [
            TimedLines(event["timestamp"] / 1000, event["message"].rstrip("\n") + "\n") for event in answer["events"]
        ]
        return page, answer["nextForwardToken"]

    def _last_result(self, stream: tuple[str, str], key: str) -> str:
        """Return the last result among the last lines of a stream that is signed with a key; empty if there is none."""
        with contextlib.suppress(AwsError):
            events = self._log_events(stream, startFromHead=False, limit=200)["events"]
            return next(reversed(verified([event["message"] for event in events], key)), "")
        return ""

    def _log_events(self, stream: tuple[str, str], **more: Any) -> dict[str, Any]:
        return self._aws.call("logs", "GetLogEvents", logGroupName=stream[0], logStreamName=stream[1], **more)

    # -- ending --------------------------------------------------------------------------------------------------------

    def stop(self, app: AwsSnapshot, outcome: Outcome, grace: float | None) -> None:
        if snapshot.state(app.job) in (State.PENDING, State.RUNNING):
            self._aws.call("batch", "TerminateJob", jobId=app.job["jobId"], reason=snapshot.CANCELLED)

    def remove(self, app: AwsSnapshot) -> None:
        """End the job, deregister its definition, delete its secret and tag it as deleted.

        Batch itself keeps jobs for a week. Logs stay in CloudWatch for the retention time of the log group.
        """
        self.stop(app, Outcome(State.CANCELLED), None)
        secrets = request.secrets_of(app.job)
        for definition in self._definitions(app.app_id):
            secrets += request.secrets_of(definition)
            self._aws.call("batch", "DeregisterJobDefinition", jobDefinition=definition["jobDefinitionArn"])
        if "jobArn" in app.job:
            self._quietly("batch", "TagResource", resourceArn=app.job["jobArn"], tags={request.TAG_DELETED: "true"})
        for secret in dict.fromkeys(secrets):
            self._delete_secret(secret)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _summaries(self, queue: str, name: str, value: str) -> Iterator[dict[str, Any]]:
        filters = [{"name": name, "values": [value]}]
        return self._aws.each("ListJobs", "jobSummaryList", jobQueue=queue, filters=filters)

    def _described(self, ids: Sequence[str]) -> list[dict[str, Any]]:
        found = []
        for start in range(0, len(ids), _MAX_DESCRIBED):
            found += self._aws.call("batch", "DescribeJobs", jobs=list(ids[start : start + _MAX_DESCRIBED]))["jobs"]
        return found

    def _definitions(self, app_id: str) -> list[dict[str, Any]]:
        name = app_id.rpartition(":")[2]
        if not re.fullmatch(r"[\w-]+", name, re.ASCII):
            return []
        found = self._aws.each("DescribeJobDefinitions", "jobDefinitions", jobDefinitionName=name, status="ACTIVE")
        return [definition for definition in found if _is_app(definition)]

    def _quietly(self, service: str, operation: str, **arguments: Any) -> None:
        try:
            self._aws.call(service, operation, **arguments)
        except AwsError as error:
            _log.warning("%s", error)

    def _delete_secret(self, secret: str) -> None:
        self._quietly("secretsmanager", "DeleteSecret", SecretId=secret, ForceDeleteWithoutRecovery=True)


def _is_app(described: Mapping[str, Any]) -> bool:
    """Return whether a job or a definition is of an app of this scheduler that was not deleted."""
    tags = described.get("tags", {})
    return tags.get(request.TAG_SCHEDULER) == request.SCHEDULER and request.TAG_DELETED not in tags
