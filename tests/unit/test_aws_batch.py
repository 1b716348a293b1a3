# SPDX-License-Identifier: BSD-3-Clause
"""monarch_aws_batch without an AWS: requests, checked against AWS's model, a node's shell, what answers mean."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchx.runner import Runner
from torchx.specs import AppDef, BindMount, DeviceMount, Resource, RetryPolicy, Role, VolumeMount, resource

from tests.clusters.aws_batch.model import operation
from torchx_monarch import schedulers
from torchx_monarch.backends.aws_batch import request, snapshot
from torchx_monarch.backends.aws_batch.request import APP_PARAMETER, TAG_VERSION, BatchJob, new_name
from torchx_monarch.backends.aws_batch.snapshot import CANCELLED, app_snapshot
from torchx_monarch.backends.core.state import reduce
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.model.role_spec import RoleSpec, WorkloadKind
from torchx_monarch.model.state import State

NAME = "monarch_aws_batch"


def job(*roles: Role, name: str = "app", metadata: dict[str, str] | None = None, **cfg: Any) -> BatchJob:
    app = AppDef(name, list(roles), metadata or {})
    with Runner("torchx", {NAME: schedulers.monarch_aws_batch}) as runner:
        made: BatchJob = runner.dryrun(app, NAME, cfg={"queue": "q", **cfg}).request
    return made


def role(name: str = "trainer", replicas: int = 2, **more: Any) -> Role:
    args = ["--nnodes", str(replicas), "--nproc-per-node", "2", "train.py"]
    more.setdefault("resource", Resource(cpu=2, gpu=0, memMB=1024))
    return Role(name, "image", entrypoint="torchrun", args=args, num_replicas=replicas, **more)


def shell(name: str, replicas: int) -> Role:
    resource = Resource(cpu=1, gpu=0, memMB=512)
    return Role(name, "image", entrypoint="sh", args=["-c", "x"], num_replicas=replicas, resource=resource)


def containers(made: BatchJob) -> list[dict[str, Any]]:
    if "containerProperties" in made.definition:
        return [made.definition["containerProperties"]]
    return [node_range["container"] for node_range in made.definition["nodeProperties"]["nodeRangeProperties"]]


def complaints(made: BatchJob) -> list[str]:
    """What AWS would say of the requests."""
    requests = (("/v1/registerjobdefinition", made.definition), ("/v1/submitjob", made.submit))
    return [problem for path, body in requests for problem in operation("POST", path, "").request(body)]


MOUNTS = [
    BindMount("/data", "/in", read_only=True),
    VolumeMount("fs-12345678", "/efs"),
    VolumeMount("fs-12345678:/folder", "/folder"),
    DeviceMount("/dev/fuse", "/dev/fuse", "rw"),
]


@pytest.mark.parametrize("replicas", [1, 3])
def test_requests_are_as_aws_wants_them(replicas: int) -> None:
    made = job(
        role("first", replicas, mounts=MOUNTS, max_retries=3, resource=resource(h="aws_p4d.24xlarge")),
        metadata={"a" * 200: "b" * 300, "aws:x": "y", "ü #": "1%"},
        share_id="share",
        priority=7,
        job_role_arn="arn:aws:iam::1:role/job",
        execution_role_arn="arn:aws:iam::1:role/execution",
        ulimits=["memlock:-1:-1", "nofile:1024:4096"],
        privileged=True,
        timeout=3600,
        log_group="/mine",
    )
    assert complaints(made) == []
    assert made.submit["shareIdentifier"] == "share" and made.definition["schedulingPriority"] == 7
    assert made.definition["timeout"] == {"attemptDurationSeconds": 3600}
    assert made.definition["retryStrategy"]["attempts"] == 4
    tags = made.submit["tags"]
    assert tags["a" * 128] == "b" * 256 and tags["ü _"] == "1_" and "aws:x" not in tags
    (container,) = containers(made)
    assert container["instanceType"] == "p4d.24xlarge"
    assert {"type": "GPU", "value": "8"} in container["resourceRequirements"]
    assert (container["jobRoleArn"][-3:], container["executionRoleArn"][-9:], container["privileged"]) == (
        "job",
        "execution",
        True,
    )
    assert container["ulimits"][1] == {"name": "nofile", "softLimit": 1024, "hardLimit": 4096}
    assert container["logConfiguration"]["options"] == {"awslogs-group": "/mine"}
    assert [volume.get("host") or volume["efsVolumeConfiguration"] for volume in container["volumes"]] == [
        {"sourcePath": "/data"},
        {"fileSystemId": "fs-12345678"},
        {"fileSystemId": "fs-12345678", "rootDirectory": "/folder"},
    ]
    assert [(point["containerPath"], point["readOnly"]) for point in container["mountPoints"]] == [
        ("/in", True),
        ("/efs", False),
        ("/folder", False),
    ]
    devices = [device["hostPath"] for device in container["linuxParameters"]["devices"]]
    assert devices == ["/dev/fuse", *(f"/dev/infiniband/uverbs{index}" for index in range(4))]
    assert container["linuxParameters"]["devices"][0]["permissions"] == ["READ", "WRITE"]
    assert container["linuxParameters"]["sharedMemorySize"] == resource(h="aws_p4d.24xlarge").memMB


def test_neuron_devices() -> None:
    (container,) = containers(job(role(resource=resource(h="aws_trn1.32xlarge"))))
    devices = [device["hostPath"] for device in container["linuxParameters"]["devices"]]
    assert [device for device in devices if "neuron" in device] == [f"/dev/neuron{index}" for index in range(16)]
    assert container["instanceType"] == "trn1.32xlarge"


def test_one_node_range_for_each_role() -> None:
    made = job(role("a", 2), shell("b", 1), shell("c", 3))
    assert complaints(made) == []
    nodes = made.definition["nodeProperties"]
    assert (nodes["numNodes"], nodes["mainNode"]) == (6, 0)
    assert [node_range["targetNodes"] for node_range in nodes["nodeRangeProperties"]] == ["0:1", "2:2", "3:5"]


@pytest.mark.parametrize(
    ("replicas", "kind", "job_type", "expected"),
    [
        (1, None, "auto", "container"),
        (1, "aws_p3.2xlarge", "auto", "multinode"),
        (1, "aws_p3.2xlarge", "container", "container"),
        (1, None, "multinode", "multinode"),
        (2, None, "auto", "multinode"),
    ],
)
def test_one_replica_is_a_plain_job_unless_it_wants_an_instance_type(
    replicas: int, kind: str | None, job_type: str, expected: str
) -> None:
    wanted = resource(h=kind) if kind else Resource(cpu=1, gpu=0, memMB=512)
    assert job(role(replicas=replicas, resource=wanted), job_type=job_type).definition["type"] == expected


def test_retries() -> None:
    assert job(role()).definition["retryStrategy"] == {"attempts": 1}
    expected = {"attempts": 2, "evaluateOnExit": [{"onExitCode": "78", "action": "EXIT"}]}
    assert job(role(max_retries=1)).definition["retryStrategy"] == expected


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        (
            [shell("a", 1), role("b", 2)],
            "role 'b' needs hosts, and this scheduler has them in the first role alone",
        ),
        ([role(max_retries=1, retry_policy=RetryPolicy.REPLICA)], "AWS Batch replaces no single node"),
        ([role(max_retries=10)], "max_retries is 10; AWS Batch starts a job again at most 9 times"),
        ([role("a", 1), role("a", 1)], "two roles of app 'app' are called 'a'"),
    ],
)
def test_what_cannot_be_is_refused(roles: list[Role], words: str) -> None:
    with pytest.raises(ValueError) as told:
        job(*roles)
    assert words in str(told.value)


@given(
    st.lists(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0$\r")), max_size=3),
    st.integers(0, 5),
    st.integers(0, 3),
)
def test_a_nodes_shell_gives_words_and_variables_as_they_are(texts: list[str], first: int, replica: int) -> None:
    shows = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['MINE'], os.environ['PLAIN']]))"
    shown = Role(
        "r", "image", entrypoint=sys.executable, args=["-ISc", shows, *texts, "=${replica_id}'"], num_replicas=9
    )
    shown.env = {"MINE": "'${replica_id}' ${replica_id}\n$$x", "PLAIN": "p"}
    words, env = request.render_command(shown, "q:app", first)
    assert words[:2] == ["sh", "-c"]
    environ = {**os.environ, **env, "AWS_BATCH_JOB_NODE_INDEX": str(first + replica)}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=240, check=True)
    assert json.loads(done.stdout) == [[*texts, f"={replica}'"], f"'{replica}' {replica}\n$x", "p"]


def test_a_shell_is_needed_only_where_replicas_ask_for_their_number() -> None:
    plain = Role("r", "image", entrypoint="/program", args=["a b", "${app_id}"], num_replicas=3)
    assert request.render_command(plain, "q:app", 0) == (["/program", "a b", "q:app"], {})
    alone = Role("r", "image", entrypoint="/program", args=["${replica_id}", "${rank0_env}"])
    assert request.render_command(alone, "q:app", 4)[0] == [
        "/program",
        "0",
        "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS",
    ]


@pytest.mark.parametrize("name", ["a" * 200, "-_-App.1", "name with blanks/and ümlauts", "x"])
def test_names_are_valid(name: str) -> None:
    made = {new_name(name) for _ in range(20)}
    assert len(made) == 20
    for checked in made:
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}", checked)


@pytest.mark.parametrize("secret", [False, True])
def test_only_hosts_get_credentials(secret: bool) -> None:
    mine = role("a", 1, env={"MONARCH_CREDENTIALS": "of the user"})
    made = job(mine, shell("sh", 1), secret=secret, execution_role_arn="arn:aws:iam::1:role/x")
    before = str(made)
    made.definition = request.with_credentials(made, RoleSpec("a", workload=WorkloadKind.RANKS), "given")
    assert complaints(made) == []
    where, key = ("secrets", "valueFrom") if secret else ("environment", "value")
    given = [
        [variable for variable in container.get(where, ()) if variable["name"] == "MONARCH_CREDENTIALS"]
        for container in containers(made)
    ]
    assert given == [[{"name": "MONARCH_CREDENTIALS", key: "given"}], []]
    assert "given" not in before and "of the user" not in before


def test_console_links() -> None:
    url = "https://us-east-1.console.aws.amazon.com/batch/home?region=us-east-1#jobs"
    assert snapshot.console_url("arn:aws:batch:us-east-1:1:job/a-1") == f"{url}/detail/a-1"
    assert snapshot.console_url("arn:aws:batch:us-east-1:1:job/a-1", multinode=True) == f"{url}/mnp-job/a-1"
    assert snapshot.console_url("arn:aws-cn:batch:cn-north-1:1:job/a-1") == ""


NAMES = ("trainer", "reader")
SPECS = [RoleSpec(name, 2, workload=WorkloadKind.RANKS, ends_together=True) for name in NAMES]
APP = AppDef("app", [Role(name, "image", entrypoint="torchrun", num_replicas=2) for name in NAMES])
SUBMITTED = SubmittedApp(APP, SPECS)

P, R, S, F, C, U = (State[name] for name in ("PENDING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED", "UNKNOWN"))


def batch_job(status: str, reason: str = "", **more: Any) -> dict[str, Any]:
    """Batch's description of a job of two roles of two nodes."""
    ranges = [{"targetNodes": nodes, "container": {"image": "image"}} for nodes in ("0:1", "2:3")]
    return {
        "jobId": "1",
        "jobName": "app-1",
        "jobArn": "arn:aws:batch:us-east-1:1:job/1",
        "status": status,
        **({"statusReason": reason} if reason else {}),
        "tags": {TAG_VERSION: "1"},
        "parameters": {APP_PARAMETER: SUBMITTED.pack()},
        "nodeProperties": {"numNodes": 4, "mainNode": 0, "nodeRangeProperties": ranges},
        **more,
    }


def node(status: str, stopped: int = 0, code: int | None = None, **more: Any) -> dict[str, Any]:
    """Batch's description of a node."""
    container = {"exitCode": code} if code is not None else {}
    return {"status": status, "container": container, **({"stoppedAt": stopped} if stopped else {}), **more}


@pytest.mark.parametrize(
    ("described", "nodes", "state", "message", "shown"),
    [
        (batch_job("SUBMITTED"), {}, P, "", [P, P, P, P]),
        # Batch stops the others when the main node has ended.
        (batch_job("SUCCEEDED"), {0: node("SUCCEEDED", 5, 0), 1: node("FAILED", 6, 143)}, S, "", [S, C, C, C]),
        (batch_job("FAILED", CANCELLED), {0: node("FAILED", 5, 143), 1: node("RUNNING")}, C, CANCELLED, [C, C, C, C]),
        (batch_job("FAILED", "Job attempt duration exceeded timeout"), {}, F, "Job attempt duration exceeded", [F] * 4),
        (batch_job("A_NEW_STATUS"), {}, U, "", [P, P, P, P]),
    ],
)
def test_states(
    described: dict[str, Any], nodes: dict[int, dict[str, Any]], state: State, message: str, shown: list[State]
) -> None:
    app = app_snapshot("q:app-1", described, nodes, {})
    status = reduce(app)
    assert status.state is state
    assert status.message.startswith(message) and bool(status.message) == bool(message)
    assert [status.state_of(replica) for replica in app.replicas] == shown
    assert app.app == APP
