# SPDX-License-Identifier: BSD-3-Clause
"""What moto never says: throttling, expired credentials, logs that grow, nodes, jobs that are stuck or start again.

What is asked and answered is checked against AWS's own model of its services (``model``).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from torchx.specs import NONE, AppDef, AppState
from torchx.specs.api import UnknownAppException

from tests.clusters.aws_batch.apps import NAME, Apps
from tests.clusters.aws_batch.wire import Wire, refusal
from torchx_monarch.backends.aws_batch import backend as aws_backend
from torchx_monarch.backends.aws_batch.backend import AWSBatchBackend
from torchx_monarch.backends.aws_batch.request import APP_PARAMETER, TAG_SCHEDULER, TAG_VERSION
from torchx_monarch.backends.core.apps import Apps as BackendApps
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.model.host_result import KEY_VARIABLE, HostResult, signed
from torchx_monarch.model.role_spec import RoleSpec, WorkloadKind

JOB = "11111111-2222-3333-4444-555555555555"
ARN = f"arn:aws:batch:eu-central-1:123456789012:job/{JOB}"
HANDLE = f"{NAME}://torchx/q:app-1"


@pytest.fixture
def wire(leaves_nothing: None, credentials: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    """An AWS that says what the test has it say."""
    made = Wire()
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.url)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "3")
    yield made
    made.stop()


@pytest.fixture
def wired(wire: Wire, tmp_path: Path) -> Iterator[Apps]:
    """Apps there."""
    apps = Apps(tmp_path)
    yield apps
    apps.runner.close()


def job(wire: Wire, apps: Apps, status: str = "RUNNING", replicas: int = 2, **more: Any) -> dict[str, Any]:
    """What DescribeJobs says of a job of one role, as AWS's own model has it, and says to this test from now on."""
    role = apps.torchrun("train.py", replicas=replicas)
    app = SubmittedApp(AppDef("app", [role]), [RoleSpec.from_role(role, workload=WorkloadKind.RANKS)])
    container = {"image": "image:1", "command": ["true"], "resourceRequirements": [{"type": "MEMORY", "value": "512"}]}
    found = {
        "jobArn": ARN,
        "jobId": JOB,
        "jobName": "app-1",
        "jobQueue": "arn:aws:batch:eu-central-1:123456789012:job-queue/q",
        "jobDefinition": "arn:aws:batch:eu-central-1:123456789012:job-definition/app-1:1",
        "status": status,
        "startedAt": 1000,
        "tags": {TAG_SCHEDULER: NAME},
        "parameters": {APP_PARAMETER: app.pack()},
        "nodeProperties": {
            "numNodes": replicas,
            "mainNode": 0,
            "nodeRangeProperties": [{"targetNodes": f"0:{replicas - 1}", "container": container}],
        },
        **more,
    }
    describes(wire, [found])
    return found


def node(parent: dict[str, Any], index: int, status: str, container: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What it says of one of its nodes."""
    keys = ("jobName", "jobQueue", "jobDefinition", "startedAt")
    return {
        **{key: parent[key] for key in keys},
        "jobId": f"{JOB}#{index}",
        "jobArn": f"{ARN}#{index}",
        "status": status,
        "nodeDetails": {"nodeIndex": index, "isMainNode": index == 0},
        "container": container,
        **more,
    }


def describes(wire: Wire, jobs: list[dict[str, Any]]) -> None:
    """Have ListJobs and DescribeJobs know of these."""
    summary = {"jobId": JOB, "jobName": "app-1"}
    wire.says("ListJobs", {"jobSummaryList": [summary]})
    wire.says("DescribeJobs", lambda asked: {"jobs": [job for job in jobs if job["jobId"] in asked["jobs"]]})


def test_waits_out_throttling(wire: Wire, wired: Apps) -> None:
    job(wire, wired, "SUCCEEDED")
    code = "TooManyRequestsException"
    summary = {"jobSummaryList": [{"jobId": JOB, "jobName": "app-1"}]}
    wire.says("ListJobs", refusal(code, "Rate exceeded", 429), refusal(code, "Rate exceeded", 429), summary)
    assert wired.status(HANDLE).state is AppState.SUCCEEDED
    wire.says("DescribeJobs", refusal(code, "Rate exceeded", 429))
    with pytest.raises(RuntimeError, match="AWS: .*calling the DescribeJobs operation.*: Rate exceeded"):
        wired.status(HANDLE)


def test_refusals_and_what_is_not_configured_are_said_in_aws_words(
    wire: Wire, wired: Apps, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told() -> str:
        with Apps(wired.folder).runner as runner, pytest.raises(RuntimeError) as error:
            runner.status(HANDLE)
        assert "\n" not in str(error.value)
        return str(error.value)

    wire.says("ListJobs", refusal("ExpiredTokenException", status=403))
    assert told() == "AWS: An error occurred (ExpiredTokenException) when calling the ListJobs operation: no"
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    assert told() == "AWS: You must specify a region."
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    assert told().startswith("AWS: Unable to locate credentials")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert told().startswith("AWS: Could not connect to the endpoint URL")


@pytest.mark.scenario("root cause in status", wire="fake")
def test_nodes_have_states_names_and_addresses(wire: Wire, wired: Apps) -> None:
    parent = job(wire, wired)
    address = {"networkInterfaces": [{"privateIpv4Address": "10.0.1.2"}]}
    describes(wire, [parent, node(parent, 0, "RUNNING", address)])
    (role,) = wired.status(HANDLE).roles
    first, second = role.replicas
    assert (first.state, first.hostname, first.hostaddr) == (AppState.RUNNING, "10.0.1.2", "10.0.1.2")
    assert (second.state, second.hostname) == (AppState.PENDING, "")
    failed = node(parent, 1, "FAILED", {"exitCode": 1}, stoppedAt=5000)
    describes(wire, [parent, node(parent, 0, "RUNNING", address), failed])
    # Batch looks at the main node alone, and may restart the job: reading it does not end it.
    assert wired.status(HANDLE).state is AppState.RUNNING
    assert "TerminateJob" not in dict(wire.asked)
    with contextlib.closing(AWSBatchBackend()) as backend:
        known = BackendApps(backend, NAME)
        assert known.address("q:app-1", "trainer") == "10.0.1.2"
        assert known.address("q:app-1", "nobody") == ""


@pytest.mark.parametrize(
    ("container", "reason", "words"),
    [
        ({"exitCode": 3}, "Essential container in task exited", "replica trainer/1 exited with code 3"),
        (
            {"exitCode": 137, "reason": "OutOfMemoryError: Container killed due to memory usage"},
            "Essential container in task exited",
            "replica trainer/1 was killed by signal 9 (SIGKILL): OutOfMemoryError: Container killed due to memory "
            "usage",
        ),
        (
            {"reason": "CannotPullContainerError: pull access denied for nothing"},
            "Task failed to start",
            "replica trainer/1 CannotPullContainerError: pull access denied for nothing",
        ),
        (
            {},
            "Host EC2 (instance i-0123456789) terminated.",
            "replica trainer/1 Host EC2 (instance i-0123456789) terminated.",
        ),
    ],
)
@pytest.mark.scenario("root cause in status", wire="fake")
def test_the_first_node_to_fail_says_why(
    wire: Wire, wired: Apps, container: dict[str, Any], reason: str, words: str
) -> None:
    parent = job(wire, wired, "FAILED", statusReason="Essential container in task exited", stoppedAt=3000)
    later = node(parent, 0, "FAILED", {"exitCode": 1}, stoppedAt=2500)
    describes(wire, [parent, later, node(parent, 1, "FAILED", container, statusReason=reason, stoppedAt=2000)])
    status = wired.status(HANDLE)
    assert (status.state, status.msg) == (AppState.FAILED, words)


@pytest.mark.scenario("cancel while running", wire="fake")
def test_only_what_was_cancelled_through_us_counts_as_cancelled(wire: Wire, wired: Apps) -> None:
    parent = job(wire, wired)
    wire.says("TerminateJob", {})
    wired.runner.cancel(HANDLE)
    (reason,) = [asked["reason"] for operation, asked in wire.asked if operation == "TerminateJob"]
    for said, state in ((reason, AppState.CANCELLED), ("by somebody in the console", AppState.FAILED)):
        describes(wire, [job(wire, wired, "FAILED", statusReason=said), node(parent, 1, "FAILED", {"exitCode": 143})])
        assert wired.status(HANDLE).state is state
        assert wired.states(HANDLE)["trainer/1"] is state


@pytest.mark.scenario("cancel while pending", wire="fake")
def test_a_stuck_job_says_what_it_waits_for(wire: Wire, wired: Apps) -> None:
    reason = "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT - The job resource requirement is higher than that can be met"
    job(wire, wired, "RUNNABLE", statusReason=reason)
    status = wired.status(HANDLE)
    assert (status.state, status.msg) == (AppState.PENDING, f"RUNNABLE: {reason}")


@pytest.mark.scenario("retries", wire="fake")
@pytest.mark.scenario("preemption", wire="fake")
def test_attempts_are_restarts(wire: Wire, wired: Apps) -> None:
    lost = {"startedAt": 1000, "stoppedAt": 2000, "statusReason": "Host EC2 (instance i-0) terminated."}
    job(wire, wired, "RUNNABLE", attempts=[lost])
    status = wired.status(HANDLE)
    assert (status.state, status.num_restarts) == (AppState.PENDING, 1)
    job(wire, wired, "SUCCEEDED", attempts=[lost, {"startedAt": 3000, "stoppedAt": 4000}])
    status = wired.status(HANDLE)
    assert (status.state, status.num_restarts) == (AppState.SUCCEEDED, 1)


@pytest.mark.parametrize("tags", [{"team": "theirs"}, {TAG_VERSION: "0.7.0"}])
def test_a_job_that_others_submitted_is_no_app(wire: Wire, wired: Apps, tags: dict[str, str]) -> None:
    """With the second tags, TorchX's former scheduler has."""
    job(wire, wired, tags=tags)
    assert wired.runner.status(HANDLE) is None
    assert wired.runner.describe(HANDLE) is None
    with pytest.raises(UnknownAppException):
        list(wired.runner.log_lines(HANDLE, "trainer", 0))
    wired.runner.cancel(HANDLE)
    wired.runner.delete(HANDLE)
    assert {operation for operation, _ in wire.asked} == {"ListJobs", "DescribeJobs"}


def test_a_forgotten_job_can_still_be_deleted(wire: Wire, wired: Apps) -> None:
    """A week after its end Batch knows it no more, and its definition is left."""
    arn = "arn:aws:batch:eu-central-1:1:job-definition/app-1:1"
    definition = {
        "jobDefinitionName": "app-1",
        "jobDefinitionArn": arn,
        "revision": 1,
        "type": "container",
        "tags": {TAG_SCHEDULER: NAME},
        "containerProperties": {"image": "image:1", "command": ["sleep", "3"]},
    }
    wire.says("ListJobs", {"jobSummaryList": []})
    wire.says("DescribeJobDefinitions", {"jobDefinitions": [definition]})
    wire.says("DeregisterJobDefinition", {})
    status = wired.status(HANDLE)
    assert (status.state, "has forgotten the job" in status.msg) == (AppState.UNKNOWN, True)
    wired.runner.delete(HANDLE)
    assert ("DeregisterJobDefinition", {"jobDefinition": arn}) in wire.asked


@pytest.mark.scenario("log follow, since, until", wire="fake")
def test_follows_a_log_through_attempts_throttling_and_empty_pages(
    wire: Wire, wired: Apps, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("POLL", 0.02), ("_DELAY", 0.1)):
        monkeypatch.setattr(aws_backend, name, seconds)
    monkeypatch.setattr(AWSBatchBackend, "poll", 0.01)
    parent = job(wire, wired)
    first = {"container": {"logStreamName": "one"}, "startedAt": 1, "stoppedAt": 2}
    looks = iter(range(1000))

    def describe(asked: dict[str, Any]) -> dict[str, Any]:
        at = next(looks)
        status = "SUCCEEDED" if at > 8 else "RUNNING"
        container = {} if at < 2 else {"logStreamName": "one" if at < 5 else "two"}
        attempts = [first] if at >= 5 else []
        both = [{**parent, "status": status}, node(parent, 1, status, container, attempts=attempts)]
        return {"jobs": [job for job in both if job["jobId"] in asked["jobs"]]}

    pages: dict[tuple[str, str], list[Any]] = {
        ("one", ""): [page("a", "b", after="1")],
        ("one", "1"): [page(after="2")],
        ("one", "2"): [refusal("ThrottlingException")] * 2 + [page("c", after="3")],
        ("one", "3"): [page(after="3")],
        ("two", ""): [refusal("ResourceNotFoundException"), page("d", after="4")],
        ("two", "4"): [page("late", after="5")],
        ("two", "5"): [page(after="5")],
    }

    def events(asked: dict[str, Any]) -> dict[str, Any]:
        answers = pages[asked["logStreamName"], asked.get("nextToken", "")]
        return dict(answers.pop(0) if len(answers) > 1 else answers[0])

    wire.says("DescribeJobs", describe)
    wire.says("GetLogEvents", events)
    assert list(wired.runner.log_lines(HANDLE, "trainer", 1, should_tail=True)) == [
        "a\n",
        "b\n",
        "c\n",
        "d\n",
        "late\n",
    ]


@pytest.mark.scenario("log follow, since, until", wire="fake")
def test_asks_for_the_time_that_is_wanted(wire: Wire, wired: Apps) -> None:
    parent = job(wire, wired, "SUCCEEDED")
    describes(wire, [parent, node(parent, 0, "SUCCEEDED", {"logStreamName": "one"})])
    wire.says("GetLogEvents", lambda asked: page(*([] if "nextToken" in asked else ["yes", "no"]), after="1"))
    since, until = (datetime.fromtimestamp(seconds, tz=timezone.utc) for seconds in (10, 20.5))
    lines = wired.runner.log_lines(HANDLE, "trainer", 0, since=since, until=until, regex="y")
    assert list(lines) == ["yes\n"]
    asked = [arguments for operation, arguments in wire.asked if operation == "GetLogEvents"]
    asked = [request for request in asked if "startTime" in request]  # the status looks at the log's end
    assert {(request["startTime"], request["endTime"]) for request in asked} == {(10000, 20501)}
    assert asked[0]["logGroupName"] == "/aws/batch/job"


@pytest.mark.scenario("root cause in status", wire="fake")
def test_the_hosts_result_is_read_from_the_log(wire: Wire, wired: Apps) -> None:
    parent = job(wire, wired, "FAILED")
    container = {"exitCode": 3, "logStreamName": "one"}
    environment = parent["nodeProperties"]["nodeRangeProperties"][0]["container"].setdefault("environment", [])
    environment.append({"name": KEY_VARIABLE, "value": "key"})
    describes(wire, [parent, node(parent, 0, "FAILED", container)])
    words = "rank 1 (local rank 1 on n, pid 7) exited with code 3: ValueError: x"
    result = f"[monarch] {signed(HostResult(3, words, rank_restarts=2).to_text(), 'key')}"
    forged = f"[monarch] {signed(HostResult(4, 'the network of host 7 is broken').to_text(), 'other')}"
    lines = ("before", f"[monarch] FAILED: {words} (12.40 s)", result, forged, result.replace("code 3", "code 4"))
    said = "[monarch] FAILED: the network of host 7 is broken (0.01 s)"
    wire.says("GetLogEvents", page(*lines, said, "[monarch] restarts of ranks: 7", after="1"))
    status = wired.status(HANDLE)
    error = json.loads(status.structured_error_msg)["message"]
    assert (error["message"], error["errorCode"], status.num_restarts) == (words, 3, 2)

    environment.clear()  # nobody can have signed
    status = wired.status(HANDLE)
    assert (status.structured_error_msg, status.num_restarts) == (NONE, 0)


def page(*lines: str, after: str) -> dict[str, Any]:
    """An answer to GetLogEvents."""
    events = [{"timestamp": 1000, "message": line, "ingestionTime": 1000} for line in lines]
    return {"events": events, "nextForwardToken": after, "nextBackwardToken": "0"}
