# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The TorchX scheduler for AWS Batch, which ``monarch_aws_batch`` wraps."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from torchx.schedulers.api import DescribeAppResponse, ListAppResponse, Scheduler, Stream
from torchx.specs import NONE, AppDef, AppDryRunInfo, AppState, CfgVal, Role, runopts
from torchx.workspace.docker_workspace import DockerWorkspaceMixin

from torchx_monarch.backends import appdef_codec, validation
from torchx_monarch.backends.aws_batch import check, logs, request, status
from torchx_monarch.backends.aws_batch.client import Aws, AwsError
from torchx_monarch.backends.aws_batch.command import RANK0
from torchx_monarch.backends.aws_batch.options import AWSBatchOpts
from torchx_monarch.backends.aws_batch.request import BatchJob
from torchx_monarch.backends.errors import UserError
from torchx_monarch.backends.options import run_options
from torchx_monarch.backends.protocols import CREDENTIALS
from torchx_monarch.model.job_result import RANK_RESTARTS, read_error_file
from torchx_monarch.system import error_files, signed_line

_AT_A_TIME = 100
"""Most jobs in one DescribeJobs request, by Batch's documentation."""

_JOB_EXPIRED = "AWS Batch has forgotten the job, as it does a week after its end; only the job definition is left"

_log = logging.getLogger("torchx_monarch")


class RequestError(UserError):
    """AWS Batch cannot run the app as specified. The torchx command shows the message without a traceback."""


@dataclass(frozen=True)
class _BatchSnapshot:
    """The state of an app at one time.

    Attributes:
        job: Batch's description of the job; empty if Batch keeps only the job definition.
        app: the app as submitted, or as far as the job or its definition tells.
    """

    job: Mapping[str, Any]
    app: AppDef

    @property
    def is_multinode(self) -> bool:
        return "nodeProperties" in self.job


class AWSBatchScheduler(DockerWorkspaceMixin, Scheduler[AWSBatchOpts]):  # type: ignore[misc]
    """Runs an app as one job of AWS Batch, with boto3's credentials and region.

    Passes Monarch hosts replica 0's address and the credentials; other roles run as ordinary containers.

    Args:
        session_name: TorchX's session name.
    """

    always_together = True
    """Batch ends a job with its main node, and restarts all nodes or none."""

    def __init__(self, session_name: str) -> None:
        super().__init__(request.SCHEDULER, session_name)
        self._aws = Aws()
        self._ids: dict[str, str] = {}

    def close(self) -> None:
        """Close the connections."""
        self._aws.close()

    def _run_opts(self) -> runopts:
        return run_options(AWSBatchOpts)

    def _validate(self, app: AppDef, scheduler: str, cfg: Mapping[str, CfgVal]) -> None:
        """Do nothing: ``_submit_dryrun`` reports what a role lacks."""

    # -- submitting ----------------------------------------------------------------------------------------------------

    def _submit_dryrun(self, app: AppDef, cfg: AWSBatchOpts) -> AppDryRunInfo[BatchJob, AWSBatchOpts]:
        try:
            images = self._images(app, cfg)
            for role in app.roles:
                check.check_hosts(role, app.roles[0])
            check.warn_of_unawaited(app)
            job = request.render(app, cfg)
            job.images_to_push = images
            said = request.drop_app_if_too_large(job)
        except ValueError as error:
            raise RequestError(str(error)) from None
        if said:
            _log.warning("%s", said)
        return AppDryRunInfo(job, str)

    def _images(self, app: AppDef, cfg: AWSBatchOpts) -> dict[str, tuple[str, str]]:
        local = [role.image for role in app.roles if role.image.startswith("sha256:")]
        if local and not cfg.image_repo:
            raise ValueError(
                f"the image {local[0]} is on this machine alone, where a workspace was built into it: name a "
                "repository to push it to in the run option image_repo, or submit without a workspace (--workspace '')"
            )
        pushed: dict[str, tuple[str, str]] = self.dryrun_push_images(app, {"image_repo": cfg.image_repo})
        return pushed

    def replica0_host(self, app: AppDef, role: Role) -> str:
        """Return ``@VARIABLE`` with the main node's address for the first role; ``@`` (unknown) for others.

        Batch gives the nodes no other node's address.
        """
        return f"@{RANK0}" if role is app.roles[0] else "@"

    def schedule(self, dryrun_info: AppDryRunInfo[BatchJob, AWSBatchOpts]) -> str:
        """Submit the job and return the app's id, QUEUE:NAME.

        Raises:
            ValueError: this request was submitted before.
            AwsError: AWS is unreachable or refuses; the secret and the job definition are removed again.
        """
        job = copy.deepcopy(dryrun_info.request)
        if job.app_id in self._ids:
            raise ValueError(f"this request was submitted already, as {job.app_id}; another job needs another dry run")
        self.push_images(job.images_to_push)
        undo = contextlib.ExitStack()
        with undo:
            if job.secret:
                arn = self._aws.call("secretsmanager", "CreateSecret", **job.secret)["ARN"]
                undo.callback(self._delete_secret, arn)
                job.definition = _replaced(job.definition, request.SECRET_ARN, arn)
            made = self._aws.call("batch", "RegisterJobDefinition", **job.definition)["jobDefinitionArn"]
            undo.callback(self._quietly, "batch", "DeregisterJobDefinition", jobDefinition=made)
            answer = self._aws.call("batch", "SubmitJob", **{**job.submit, "jobDefinition": made})
            undo.pop_all()
        self._ids[job.app_id] = answer["jobId"]
        return str(job.app_id)

    def _quietly(self, service: str, operation: str, **arguments: Any) -> None:
        try:
            self._aws.call(service, operation, **arguments)
        except AwsError as error:
            _log.warning("%s", error)

    def _delete_secret(self, secret: str) -> None:
        self._quietly("secretsmanager", "DeleteSecret", SecretId=secret, ForceDeleteWithoutRecovery=True)

    # -- querying ------------------------------------------------------------------------------------------------------

    def _job(self, app_id: str) -> Mapping[str, Any] | None:
        """Return Batch's description of an app's job; None if Batch does not know it or it was deleted."""
        queue, _, name = app_id.rpartition(":")
        if not queue or not name:
            return None
        if app_id not in self._ids:
            by_name = [{"name": "JOB_NAME", "values": [name]}]
            for page in self._aws.pages("batch", "ListJobs", jobQueue=queue, filters=by_name):
                for each in page["jobSummaryList"]:
                    if each["jobName"] == name:  # the filter ignores case
                        self._ids[app_id] = each["jobId"]
        if app_id not in self._ids:
            return None
        found = self._described([self._ids[app_id]])
        return found[0] if found and request.TAG_DELETED not in found[0].get("tags", {}) else None

    def _described(self, ids: Sequence[str]) -> list[dict[str, Any]]:
        found = []
        for start in range(0, len(ids), _AT_A_TIME):
            found += self._aws.call("batch", "DescribeJobs", jobs=list(ids[start : start + _AT_A_TIME]))["jobs"]
        return found

    def _definitions(self, app_id: str) -> list[dict[str, Any]]:
        name = app_id.rpartition(":")[2]
        if not re.fullmatch(r"[\w-]+", name, re.ASCII):
            return []
        pages = self._aws.pages("batch", "DescribeJobDefinitions", jobDefinitionName=name, status="ACTIVE")
        return [each for page in pages for each in page["jobDefinitions"]]

    def _find(self, app_id: str) -> _BatchSnapshot | None:
        job = self._job(app_id)
        if job is None:
            known = self._definitions(app_id) if app_id not in self._ids else []
            ours = [each for each in known if request.TAG_VERSION in each.get("tags", {})]
            return _BatchSnapshot({}, _app(app_id, ours[0])) if ours else None
        return _BatchSnapshot(job, _app(app_id, job))

    def _nodes(self, found: _BatchSnapshot) -> dict[int, Mapping[str, Any]]:
        """Return Batch's description of each node that Batch knows, by node index."""
        if not found.job:
            return {}
        if not found.is_multinode:
            return {0: found.job}
        ids = [f"{found.job['jobId']}#{index}" for index in range(found.job["nodeProperties"]["numNodes"])]
        return {int(node["jobId"].rpartition("#")[2]): node for node in self._described(ids) if "#" in node["jobId"]}

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """Describe an app and its nodes, with the roles as submitted; None if the app does not exist.

        Raises:
            AwsError: AWS is unreachable or refuses.
        """
        with _cli_error():
            found = self._find(app_id)
            if found is None:
                return None
            if not found.job:
                return DescribeAppResponse(
                    app_id=app_id,
                    state=AppState.UNKNOWN,
                    msg=_JOB_EXPIRED,
                    metadata=found.app.metadata,
                    roles=found.app.roles,
                )
            nodes = self._nodes(found)
            state, wanted = status.state(found.job), found.app.roles
            return DescribeAppResponse(
                app_id=app_id,
                state=state,
                num_restarts=status.restarts(found.job)
                + (self._rank_restarts(found, nodes) if state in status.ENDED else 0),
                msg=status.explanation(found.job, nodes, wanted) or NONE,
                structured_error_msg=(self._root_cause(found, nodes) if state is AppState.FAILED else "") or NONE,
                ui_url=status.console_url(found.job.get("jobArn", ""), found.is_multinode) or None,
                metadata=found.app.metadata,
                roles_statuses=status.roles_statuses(found.job, nodes, wanted),
                roles=wanted,
            )

    def _root_cause(self, found: _BatchSnapshot, nodes: Mapping[int, Mapping[str, Any]]) -> str:
        """Return the root cause in the form of a torchelastic error file; empty if unknown.

        Hosts write it as a signed line at the end of their logs: replica 0 of the first role, else the node that failed
        first.
        """
        group, key = status.log_group(found.job), status.variable(found.job, signed_line.KEY_VARIABLE)
        for index in dict.fromkeys(each for each in (0, status.cause(nodes)) if each is not None):
            node = nodes.get(index, found.job)
            with contextlib.suppress(AwsError):
                for stream in status.streams(node, group)[-1:]:
                    if said := signed_line.verified(logs.tail(self._aws, stream), key):
                        return error_files.cleaned(said[-1])
        return ""

    def _rank_restarts(self, found: _BatchSnapshot, nodes: Mapping[int, Mapping[str, Any]]) -> int:
        """Return the sum of the rank restarts that replica 0 of the first role has logged at the end of its attempts.

        An attempt that was killed has logged none.
        """
        count, key = 0, status.variable(found.job, signed_line.KEY_VARIABLE)
        with contextlib.suppress(AwsError):
            for stream in status.streams(nodes.get(0, found.job), status.log_group(found.job)):
                said = signed_line.verified(logs.tail(self._aws, stream), key)
                count += read_error_file(said[-1]).get(RANK_RESTARTS, 0) if said else 0
        return count

    def client_host(self, app_id: str, role: str) -> str:
        """Return the address of the role's replica 0, reachable inside the nodes' VPC only; empty if unknown."""
        found = self._find(app_id)
        if found is None or role not in [each.name for each in found.app.roles]:
            return ""
        return status.address(self._nodes(found).get(status.first_node(role, found.app.roles), {}))

    def list(self, cfg: Mapping[str, CfgVal] | None = None) -> list[ListAppResponse]:
        """List this scheduler's apps, the newest first.

        Args:
            cfg: its ``queue`` is the queue; without it, all queues are listed.

        Raises:
            AwsError: AWS is unreachable or refuses.
        """
        with _cli_error():
            queue = dict(cfg or {}).get("queue")
            found = []
            for name in [request.queue_name(str(queue))] if queue else self._queues():
                found += [(job.get("createdAt", 0), name, job) for job in self._ours(name)]
            found.sort(key=lambda each: each[0], reverse=True)
            return [
                ListAppResponse(
                    f"{name}:{job['jobName']}", status.state(job), name=job["tags"].get(request.TAG_APP, "")
                )
                for _, name, job in found
            ]

    def _queues(self) -> Sequence[str]:
        pages = self._aws.pages("batch", "DescribeJobQueues")
        return [queue["jobQueueName"] for page in pages for queue in page["jobQueues"]]

    def _ours(self, queue: str) -> Iterator[dict[str, Any]]:
        """Yield the jobs of a queue that this scheduler submitted, by their tags, which only DescribeJobs returns.

        (TorchX's former scheduler examined the first hundred jobs only.)
        """
        # Without a filter, ListJobs returns running jobs only.
        ever = [{"name": "AFTER_CREATED_AT", "values": ["1"]}]
        ids = [
            each["jobId"]
            for page in self._aws.pages("batch", "ListJobs", jobQueue=queue, filters=ever)
            for each in page["jobSummaryList"]
            # This scheduler gives each job a definition of the same name. Other jobs need no DescribeJobs.
            if f"job-definition/{each['jobName']}:" in each.get("jobDefinition", f"job-definition/{each['jobName']}:")
        ]
        for job in self._described(ids):
            tags = job.get("tags", {})
            if tags.get(request.TAG_SCHEDULER) == request.SCHEDULER and request.TAG_DELETED not in tags:
                yield job

    def log_iter(
        self,
        app_id: str,
        role_name: str,
        k: int = 0,
        regex: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        should_tail: bool = False,
        streams: Stream | None = None,
    ) -> Iterable[str]:
        """Return the lines of one replica's log, from all of its attempts.

        Raises:
            ValueError: the app, role or replica does not exist; ``regex`` is invalid; or ``streams`` selects one
                stream, while CloudWatch merges both.
            AwsError: AWS is unreachable or refuses.
        """
        if streams not in (None, Stream.COMBINED):
            raise UserError(f"AWS Batch writes both streams into one log; {streams.value} alone is not to be had")
        found = self._find(app_id)
        if found is None or not found.job:
            raise UserError(f"there is no app {app_id!r} in AWS Batch{f': {_JOB_EXPIRED}' if found else ''}")
        validation.check_replica(app_id, {role.name: role.num_replicas for role in found.app.roles}, role_name, k)
        index = status.first_node(role_name, found.app.roles) + k
        job_id, group = str(found.job["jobId"]), status.log_group(found.job)

        def look() -> tuple[list[tuple[str, str]], bool]:
            wanted = f"{job_id}#{index}" if found.is_multinode else job_id
            described = {each["jobId"]: each for each in self._described(list(dict.fromkeys((job_id, wanted))))}
            ended = status.state(described.get(job_id, {})) not in (AppState.PENDING, AppState.RUNNING)
            return status.streams(described.get(wanted, {}), group), ended

        lines = logs.lines(self._aws, look, since=since, until=until, follow=should_tail)
        return validation.matching(lines, regex)

    # -- cancelling and deleting ---------------------------------------------------------------------------------------

    def _cancel_existing(self, app_id: str) -> None:
        """Have Batch end the job, in whatever state it is, and return without waiting; do nothing if it has ended.

        Raises:
            AwsError: AWS is unreachable or refuses.
        """
        with _cli_error():
            job = self._job(app_id)
            if job is not None and status.state(job) not in status.ENDED:
                self._aws.call("batch", "TerminateJob", jobId=job["jobId"], reason=status.CANCELLED)

    def _delete_existing(self, app_id: str) -> None:
        """End the job, deregister its definition, delete its secret and tag the job as deleted.

        Batch itself keeps jobs for a week. Logs stay in CloudWatch for the retention time of the log group.

        Raises:
            AwsError: AWS is unreachable or refuses.
        """
        with _cli_error():
            job = self._job(app_id)
            self._cancel_existing(app_id)
            secrets: dict[str, None] = {}
            for definition in self._definitions(app_id):
                if request.TAG_VERSION in definition.get("tags", {}):
                    secrets |= dict.fromkeys(_secrets(definition))
                    self._aws.call("batch", "DeregisterJobDefinition", jobDefinition=definition["jobDefinitionArn"])
            if job is not None:
                secrets |= dict.fromkeys(_secrets(job))
                if "jobArn" in job:
                    self._quietly("batch", "TagResource", resourceArn=job["jobArn"], tags={request.TAG_DELETED: "true"})
            for secret in secrets:
                self._delete_secret(secret)


def _app(app_id: str, job: Mapping[str, Any]) -> AppDef:
    packed = job.get("parameters", {}).get(request.APP_PARAMETER, "")
    app = appdef_codec.unpack(packed) if packed else None
    name = job.get("tags", {}).get(request.TAG_APP) or app_id.rpartition(":")[2]
    return app or AppDef(name, request.roles_of(job))


def _containers(definition: Mapping[str, Any]) -> list[dict[str, Any]]:
    nodes = definition.get("nodeProperties")
    if nodes:
        return [each["container"] for each in nodes["nodeRangeProperties"]]
    one = definition.get("containerProperties") or definition.get("container")
    return [one] if one else []


def _secrets(definition: Mapping[str, Any]) -> list[str]:
    """Return the ARNs of the secrets that ``schedule`` created for a job."""
    given = [each for one in _containers(definition) for each in one.get("secrets", ())]
    return [
        each["valueFrom"] for each in given if each["name"] == CREDENTIALS and ":torchx-monarch/" in each["valueFrom"]
    ]


def _replaced(value: Any, old: str, new: str) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(each, old, new) for key, each in value.items()}
    if isinstance(value, list):
        return [_replaced(each, old, new) for each in value]
    return new if value == old else value


@contextlib.contextmanager
def _cli_error() -> Iterator[None]:
    """Exit the torchx command with the message of an ``AwsError`` instead of a traceback."""
    try:
        yield
    except AwsError as error:
        if os.path.basename(sys.argv[0]) == "torchx":
            raise SystemExit(str(error)) from None
        raise


def create_scheduler(session_name: str, **kwargs: Any) -> AWSBatchScheduler:
    """Create the scheduler (TorchX's factory). Sends no request yet; ignores other schedulers' parameters."""
    return AWSBatchScheduler(session_name)
