# SPDX-License-Identifier: BSD-3-Clause
"""Run an app as one job of AWS Batch, with boto3's credentials and region."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torchx.specs import AppDef
from torchx.workspace.docker_workspace import DockerWorkspaceMixin

from torchx_monarch.backends.aws_batch import logs, request, snapshot
from torchx_monarch.backends.aws_batch.container import RANK0
from torchx_monarch.backends.aws_batch.jobs import Jobs
from torchx_monarch.backends.aws_batch.native import Aws
from torchx_monarch.backends.aws_batch.options import AWSBatchOpts, check_app, check_cloud, check_options
from torchx_monarch.backends.aws_batch.request import BatchJob, result_key
from torchx_monarch.backends.aws_batch.snapshot import BatchSnapshot, Results
from torchx_monarch.backends.core.backend import Backend, Capabilities, Cfg, LogQuery
from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.backends.core.snapshot import Outcome
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.core.timed_line import TimedLine
from torchx_monarch.model.check_result import CheckResult
from torchx_monarch.model.state import State


class AWSBatchBackend(Backend[AWSBatchOpts, BatchJob, BatchSnapshot]):
    """Runs each replica as a node of a job.

    Passes Monarch hosts replica 0's address and the credentials; other roles run as ordinary containers. Batch ends a
    job with its main node, and restarts all nodes or none. Methods that send requests raise ``AwsError`` if AWS is
    unreachable or refuses.
    """

    options = AWSBatchOpts
    capabilities = Capabilities(
        separates_roles=True,
        restarts_apps_only=True,
        removes_running_apps=True,
        kills=False,
        separate_streams=False,
        needs_image=True,
    )
    poll = logs.POLL

    def __init__(self) -> None:
        self.workspace = DockerWorkspaceMixin()
        self._aws = Aws()
        self._jobs = Jobs(self._aws)

    def close(self) -> None:
        self._aws.close()

    # -- submitting ----------------------------------------------------------------------------------------------------

    def checks(self, options: AWSBatchOpts | None) -> Iterable[CheckResult]:
        return check_cloud(self._aws, options)

    def check_options(self, options: AWSBatchOpts) -> None:
        check_options(options)

    def replica0_host(self, app: AppDef, role: int) -> str:
        """Return ``@VARIABLE`` with the main node's address for the first role; ``@`` (unknown) for others.

        Batch gives the nodes no other node's address.
        """
        return "@" if role else f"@{RANK0}"

    def render(self, app: AppDef, submitted: SubmittedApp, options: AWSBatchOpts) -> BatchJob:
        check_app(app, submitted.roles, options)
        return request.render(app, submitted.roles, options)

    def submit(self, request: BatchJob, submitted: SubmittedApp, credentials: str) -> str:
        self._jobs.submit(request, submitted, credentials)
        return request.app_id

    # -- reading -------------------------------------------------------------------------------------------------------

    def snapshot(self, app_id: str, *, brief: bool = False) -> BatchSnapshot | None:
        job = self._jobs.find(app_id)
        if job is None:
            return None
        nodes = self._jobs.nodes(job)
        has_ended = snapshot.state(job).is_terminal
        return snapshot.app_snapshot(app_id, job, nodes, self._results(job, nodes) if has_ended and not brief else {})

    def _results(self, job: Mapping[str, Any], nodes: Mapping[int, Mapping[str, Any]]) -> Results:
        """Read the result of the main node's host, and of the node that failed first if the main node has none."""
        key, results = result_key(job), dict[int, list[str]]()
        for index in dict.fromkeys((0, snapshot.first_failed(nodes))):
            if key and index in nodes and not any(map(any, results.values())):
                streams = snapshot.streams(job, nodes[index])
                results[index] = [logs.last_result(self._aws, stream, key) for stream in streams]
        return results

    def snapshots(self, options: Cfg) -> list[BatchSnapshot]:
        """Read the state of all apps of the queue in ``options``, or of all queues, without the nodes."""
        chosen = options.get("queue")
        apps = [
            snapshot.app_snapshot(f"{queue}:{job['jobName']}", job, {}, {})
            for queue in ([request.queue_name(str(chosen))] if chosen else self._jobs.queues())
            for job in self._jobs.in_queue(queue)
        ]
        return sorted(apps, key=lambda app: app.created, reverse=True)

    def read_log(
        self, app: BatchSnapshot, role: str, replica: int, query: LogQuery[BatchSnapshot]
    ) -> Iterable[TimedLine]:
        """Return lines of a replica's log, from all of its attempts."""
        if app.is_forgotten:
            raise UserError(f"there is no log of {app.app_id}: {snapshot.FORGOTTEN}")
        index = [(node.role, node.id) for node in app.replicas].index((role, replica))

        def streams() -> list[tuple[str, str]]:
            latest = query.latest() if query.follow else app
            return snapshot.streams(latest.job, latest.nodes.get(index, {})) if latest else []

        return logs.lines(self._aws, streams, query)

    # -- ending --------------------------------------------------------------------------------------------------------

    def stop(self, app: BatchSnapshot, outcome: Outcome, grace: float | None) -> None:
        if snapshot.state(app.job) in (State.PENDING, State.RUNNING):
            self._jobs.end(app.job, snapshot.CANCELLED)

    def remove(self, app: BatchSnapshot) -> None:
        self.stop(app, Outcome(State.CANCELLED), None)
        self._jobs.remove(app.app_id, app.job)
