# SPDX-License-Identifier: BSD-3-Clause
"""Apps on moto's AWS Batch: requests, looking, listing, deleting; and jobs that really run, as containers of Docker."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from torchx.specs import AppDef, AppState, InvalidRunConfigException

from tests.clusters.aws_batch.apps import NAME, Apps, Aws, definitions, request_of
from tests.clusters.docker.daemon import Daemon
from tests.waits import until
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


@pytest.mark.scenario("root cause in status", wire="moto+docker")
@pytest.mark.scenario("status and log long after, elsewhere", wire="moto+docker")
def test_a_failing_rank_is_the_cause(running_apps: Apps) -> None:
    apps = running_apps
    path = apps.program("""
        import os, time
        if os.environ["RANK"] == "1":
            raise ValueError("boom")
        time.sleep(1000)
    """)
    handle = apps.run(apps.torchrun("--max-restarts", "1", path, nproc=1))
    status = apps.wait(handle)
    assert (status.state, status.num_restarts) == (AppState.FAILED, 1)
    error = json.loads(status.structured_error_msg)["message"]
    assert error["message"].startswith("rank 1 (local rank 0 on "), apps.log(handle, replicas=2)
    assert "ValueError: boom" in error["message"]
    assert status.msg == "replica trainer/1 exited with code 1"
    assert json.loads(apps.torchx("status", "--json", handle))["state"] == "FAILED"
    log = apps.torchx("log", f"{handle}/trainer")
    assert "trainer/0 [monarch] FAILED: rank 1" in log


def test_a_lost_node_ends_the_job_and_is_named(running_apps: Apps, daemon: Daemon) -> None:
    """Batch replaces no node; with max_retries it would start all of them again, which moto does not do."""
    apps = running_apps
    handle = apps.run(
        apps.torchrun(
            apps.program(f"open({str(apps.folder / 'up')!r}, 'a').write('x'); import time; time.sleep(1000)"),
            nproc=1,
        )
    )
    until(lambda: len(read(apps.folder / "up")) == 2, "both ranks")
    with contextlib.closing(daemon.client()) as client:
        (lost,) = [container.name for container in client.containers.list() if container.name.endswith("-1")]
    daemon.kill(lost)
    status = apps.wait(handle)
    assert status.state is AppState.FAILED
    assert "host 1" in json.loads(status.structured_error_msg)["message"]["message"], apps.log(handle)


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.scenario("cancel while running", wire="moto+docker")
@pytest.mark.scenario("log follow, since, until", wire="moto+docker")
def test_cancel_while_running(running_apps: Apps, daemon: Daemon) -> None:
    apps = running_apps
    handle = apps.run(apps.role("sh", "-c", "echo up; sleep 1000"))
    until(lambda: apps.status(handle).state is AppState.RUNNING, "the container")
    # A job runs before its shell has printed, or its container exists. moto has the log only after its end.
    with contextlib.closing(daemon.client()) as client:
        until(lambda: any(b"up\n" in container.logs() for container in client.containers.list()), "the shell")
    apps.torchx("cancel", handle)
    status = apps.wait(handle)
    assert (status.state, status.msg) == (AppState.CANCELLED, "cancelled through torchx")
    assert apps.states(handle) == {"trainer/0": AppState.CANCELLED}
    assert json.loads(apps.torchx("status", "--json", handle))["state"] == "CANCELLED"
    assert list(apps.runner.log_lines(handle, "trainer", 0, should_tail=True)) == ["up\n"]
    assert list(apps.runner.log_lines(handle, "trainer", 0, regex="down")) == []
