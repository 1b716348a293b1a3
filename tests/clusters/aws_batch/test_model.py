# SPDX-License-Identifier: BSD-3-Clause
"""That nothing goes over the wire of the tests that AWS would not say, or would not be asked."""

from __future__ import annotations

from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from tests.clusters.aws_batch import model
from tests.clusters.aws_batch.wire import Wire, refusal

JOB = {"jobId": "1", "jobName": "a", "jobQueue": "q", "status": "RUNNING", "startedAt": 1, "jobDefinition": "d"}
EVENT = {"timestamp": 1, "message": "m", "ingestionTime": 1}


@pytest.mark.parametrize(
    ("target", "answer", "wrong"),
    [
        ("/v1/describejobs", {"jobs": [JOB]}, []),
        ("/v1/describejobs", {}, []),
        ("/v1/describejobs", {"Jobs": []}, ["DescribeJobs has no 'Jobs'; it has jobs"]),
        ("/v1/describejobs", {"jobs": JOB}, ["DescribeJobs.jobs is {'jobId"]),
        ("/v1/describejobs", {"jobs": [{**JOB, "jobId": None}]}, ["DescribeJobs.jobs[0] lacks 'jobId'", "is None"]),
        ("/v1/describejobs", {"jobs": [{**JOB, "status": "DONE"}]}, ["jobs[0].status is 'DONE', not one of SUBMITTED"]),
        ("/v1/describejobs", {"jobs": [{**JOB, "startedAt": "1"}]}, ["jobs[0].startedAt is '1', not a long"]),
        ("/v1/describejobs", {"jobs": [{**JOB, "isCancelled": 1}]}, ["isCancelled is 1, not a boolean"]),
        ("/v1/describejobs", {"jobs": [{**JOB, "tags": {"a": 1}}]}, ["tags['a'] is 1, not a string"]),
        ("/v1/describejobs", {"jobs": [{**JOB, "tags": {"": "1"}}]}, ["tags (key) is 0 (long), and may be 1 to 128"]),
        ("/v1/submitjob", {"jobId": "1"}, ["SubmitJob lacks 'jobName'"]),
        ("/v1/deregisterjobdefinition", {"x": 1}, ["DeregisterJobDefinition has no 'x'"]),
        ("Logs_20140328.GetLogEvents", {"events": [EVENT]}, []),
        ("Logs_20140328.GetLogEvents", {"events": [{**EVENT, "timestamp": -1}]}, ["timestamp is -1 (long)"]),
        ("secretsmanager.CreateSecret", {"Arn": "a"}, ["CreateSecret has no 'Arn'"]),
    ],
)
def test_answers(target: str, answer: dict[str, Any], wrong: list[str]) -> None:
    said = operation(target).answer(answer)
    assert len(said) == len(wrong), said
    for text, words in zip(said, wrong, strict=True):
        assert words in text


@pytest.mark.parametrize(
    ("target", "request_", "wrong"),
    [
        ("/v1/terminatejob", {"jobId": "1", "reason": "r"}, []),
        ("/v1/terminatejob", {"jobId": "1"}, ["TerminateJob lacks 'reason'"]),
        ("/v1/registerjobdefinition", {"jobDefinitionName": "a", "type": "arrays"}, ["type is 'arrays', not one of"]),
        ("/v1/tags/arn%3Aaws%2Fx", {"tags": {"a": "b"}}, []),
        ("/v1/tags/arn%3Aaws%2Fx", {}, ["TagResource lacks 'tags'"]),
        ("Logs_20140328.GetLogEvents", {"logGroupName": "a b", "logStreamName": "s"}, ["logGroupName is 'a b', which"]),
    ],
)
def test_requests(target: str, request_: dict[str, Any], wrong: list[str]) -> None:
    said = operation(target).request(request_)
    assert len(said) == len(wrong), said
    for text, words in zip(said, wrong, strict=True):
        assert words in text


def operation(target: str) -> model.Operation:
    path = target.startswith("/")
    return model.operation("POST", target if path else "/", "" if path else target)


def test_what_aws_does_not_know() -> None:
    for target in ("/v1/describejob", "Logs_20140328.GetLogs"):
        with pytest.raises(LookupError, match="AWS knows no operation"):
            operation(target)
    assert operation("/v1/listjobs").refusal("ClientException") == []
    assert operation("/v1/listjobs").refusal("ExpiredTokenException") == []
    (wrong,) = operation("/v1/listjobs").refusal("ResourceNotFoundException")
    assert wrong == "ListJobs fails with ClientException, ServerException, not with ResourceNotFoundException"
    assert operation("/v1/tags/arn%3Aaws%2Fx").uri == {"resourceArn": "arn:aws/x"}


def test_the_wire_tells_of_all_of_it(leaves_nothing: None, credentials: None) -> None:
    wire = Wire()
    client = boto3.session.Session().client("batch", endpoint_url=wire.url)
    wire.says("ListJobs", {"jobSummaryList": [{"jobId": "1"}]})
    wire.says("TerminateJob", refusal("NoSuchJob"))
    client.list_jobs(jobQueue="q", jobStatus="DONE")
    with pytest.raises(ClientError, match="NoSuchJob"):
        client.terminate_job(jobId="1", reason="r")
    with pytest.raises(ClientError, match="AccessDenied"):
        client.describe_jobs(jobs=["1"])
    client.close()
    with pytest.raises(AssertionError) as told:
        wire.stop()
    for text in (
        "request: ListJobs.jobStatus is 'DONE', not one of SUBMITTED",
        "answer: ListJobs.jobSummaryList[0] lacks 'jobName'",
        "answer: TerminateJob fails with ClientException, ServerException, not with NoSuchJob",
        "the test answers nothing to DescribeJobs",
    ):
        assert text in str(told.value)
