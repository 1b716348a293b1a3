# SPDX-License-Identifier: BSD-3-Clause
"""Apps on AWS Batch as far as moto's is like it: requests, looking, listing, deleting. Jobs succeed at once."""

from __future__ import annotations

import json

import pytest
from torchx.specs import AppDef, InvalidRunConfigException

from tests.clusters.aws_batch.apps import NAME, Apps, Aws, definitions, request_of
from torchx_monarch.backends.aws_batch.request import TAG_VERSION


@pytest.mark.scenario("list once each", wire="fake")
def test_lists_each_app_of_ours_once(apps: Apps, aws: Aws) -> None:
    first, second = apps.run(apps.torchrun("train.py")), apps.run(apps.role("true"), queue="second")
    client = aws.client("batch")
    container = {
        "image": "a",
        "resourceRequirements": [{"type": "VCPU", "value": "1"}, {"type": "MEMORY", "value": "9"}],
    }
    theirs = client.register_job_definition(jobDefinitionName="theirs", type="container", containerProperties=container)
    for tags in ({"team": "theirs"}, {TAG_VERSION: "0.7.0"}):  # the latter are those of TorchX's former scheduler
        client.submit_job(jobName="theirs", jobQueue="first", jobDefinition="theirs", tags=tags)
    client.deregister_job_definition(jobDefinition=theirs["jobDefinitionArn"])
    assert sorted(dict(apps.listed())) == sorted([first, second])
    assert apps.torchx("list", "-s", NAME).count("SUCCEEDED") == 2


@pytest.mark.scenario("delete leaves nothing", wire="fake")
@pytest.mark.parametrize("secret", [False, True])
def test_delete_removes_definition_and_secret_and_hides_the_job(apps: Apps, aws: Aws, secret: bool) -> None:
    client, secrets = aws.client("batch"), aws.client("secretsmanager")
    handle = apps.run(apps.torchrun("train.py"), secret=secret, execution_role_arn="arn:aws:iam::1:role/x")
    assert len(definitions(client)) == 1
    assert len(secrets.list_secrets()["SecretList"]) == secret
    apps.torchx("delete", handle)
    assert definitions(client) == []
    assert secrets.list_secrets()["SecretList"] == []
    assert apps.runner.status(handle) is None
    assert apps.listed() == []


@pytest.mark.scenario("credentials not on show", wire="fake")
def test_with_a_secret_aws_batch_shows_no_credentials(apps: Apps, aws: Aws) -> None:
    """Without it they are in the job definition, as docs/explanation/security.md says."""
    client = aws.client("batch")
    for secret in (True, False):
        handle = apps.run(
            apps.torchrun("train.py", replicas=1), secret=secret, execution_role_arn="arn:aws:iam::1:role/x"
        )
        text = request_of(client, handle.rpartition(":")[2])
        (environment,) = (
            {variable["name"]: variable["value"] for variable in span["containerProperties"]["environment"]}
            for span in json.loads(text)[0]
        )
        assert ("MONARCH_CREDENTIALS" in environment) is not secret
        assert (":secret:torchx-monarch/app-" in text) is secret
        if not secret:
            assert len(environment["MONARCH_CREDENTIALS"]) > 1000
            assert "MONARCH_CREDENTIALS" not in apps.described(handle).roles[0].env
        apps.runner.delete(handle)


def test_what_is_missing_is_named(apps: Apps) -> None:
    with pytest.raises(InvalidRunConfigException, match="queue"):
        apps.runner.run(AppDef("app", [apps.role("true")]), NAME, cfg={})
    with pytest.raises(ValueError, match="name a repository to push it to in the run option image_repo"):
        role = apps.role("true")
        role.image = "sha256:" + "0" * 64
        apps.run(role)


def test_a_job_that_is_refused_leaves_nothing(apps: Apps) -> None:
    """No such queue; the fixture looks at what is left."""
    with pytest.raises(RuntimeError, match="AWS: .*calling the SubmitJob operation: Job queue none does not exist"):
        apps.run(apps.torchrun("train.py"), queue="none", secret=True, execution_role_arn="arn:aws:iam::1:role/x")


def test_tags_and_console_link(apps: Apps, aws: Aws) -> None:
    handle = apps.run(apps.role("true"), user="somebody")
    job = handle.rpartition(":")[2]
    client = aws.client("batch")
    found = client.list_jobs(jobQueue="first", filters=[{"name": "JOB_NAME", "values": [job]}])["jobSummaryList"]
    (described,) = client.describe_jobs(jobs=[found[0]["jobId"]])["jobs"]
    assert described["tags"]["torchx.pytorch.org/user"] == "somebody"
    assert described["tags"]["team"] == "a b"
    url = f"https://us-east-1.console.aws.amazon.com/batch/home?region=us-east-1#jobs/detail/{described['jobId']}"
    assert apps.status(handle).ui_url == url
