# SPDX-License-Identifier: BSD-3-Clause
"""What monarch_aws_batch makes of Batch's answers: states, root causes, and the requests that it sends."""

from __future__ import annotations

from typing import Any

import pytest
from torchx.specs import AppDef, Role

from torchx_monarch.backends.aws_batch.request import APP_PARAMETER, TAG_VERSION
from torchx_monarch.backends.aws_batch.snapshot import CANCELLED, FORGOTTEN, app_snapshot
from torchx_monarch.backends.core.state import count_restarts, reduce
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.model.host_result import HostResult
from torchx_monarch.model.role_spec import RoleSpec, WorkloadKind
from torchx_monarch.model.state import State

NAMES = ("trainer", "reader")
SPECS = [RoleSpec(name, 2, workload=WorkloadKind.RANKS, ends_together=True) for name in NAMES]
APP = AppDef("app", [Role(name, "image", entrypoint="torchrun", num_replicas=2) for name in NAMES])
SUBMITTED = SubmittedApp(APP, SPECS)

P, R, S, F, C, U = (State[name] for name in ("PENDING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED", "UNKNOWN"))


def job(status: str, reason: str = "", **more: Any) -> dict[str, Any]:
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
        (job("SUBMITTED"), {}, P, "", [P, P, P, P]),
        (job("RUNNABLE", "CAPACITY: none"), {}, P, "RUNNABLE: CAPACITY: none (AWS has no such instance", [P, P, P, P]),
        (job("RUNNING"), {0: node("RUNNING"), 1: node("STARTING")}, R, "", [R, P, P, P]),
        # Batch looks at the main node alone, and may restart the job.
        (job("RUNNING"), {0: node("RUNNING"), 3: node("FAILED", 5, 1)}, R, "replica reader/1 exited", [R, P, P, F]),
        # Batch stops the others when the main node has ended.
        (job("SUCCEEDED"), {0: node("SUCCEEDED", 5, 0), 1: node("FAILED", 6, 143)}, S, "", [S, C, C, C]),
        (job("FAILED", CANCELLED), {0: node("FAILED", 5, 143), 1: node("RUNNING")}, C, CANCELLED, [C, C, C, C]),
        (
            job("FAILED", "Essential container in task exited"),
            {0: node("FAILED", 7, 1), 2: node("FAILED", 6, 3), 3: node("FAILED", 8, 137)},
            F,
            "replica reader/0 exited with code 3",
            [F, F, F, F],
        ),
        (job("FAILED", "Job attempt duration exceeded timeout"), {}, F, "Job attempt duration exceeded", [F] * 4),
        (job("A_NEW_STATUS"), {}, U, "", [P, P, P, P]),
        ({"tags": {}, "parameters": {APP_PARAMETER: SUBMITTED.pack()}}, {}, U, FORGOTTEN, [U, U, U, U]),
    ],
)
def test_states(
    described: dict[str, Any], nodes: dict[int, dict[str, Any]], state: State, message: str, shown: list[State]
) -> None:
    app = app_snapshot("q:app-1", described, nodes, {})
    status = reduce(app)
    assert status.state is state
    assert status.message.startswith(message) and bool(status.message) == bool(message)
    assert [status.shown(replica) for replica in app.replicas] == shown
    assert app.app == APP


def test_the_result_of_the_main_node_names_the_root_cause() -> None:
    """Its host ends with the code of another node's rank."""
    result = HostResult(3, "rank 1 exited with code 3", replica=1, rank_restarts=2).to_text()
    nodes = {0: node("FAILED", 5, 3), 1: node("FAILED", 6, 3)}
    attempts = [{"startedAt": 1000, "stoppedAt": 2000}, {"startedAt": 3000, "stoppedAt": 4000}]
    app = app_snapshot("q:app-1", job("FAILED", attempts=attempts, startedAt=3000), nodes, {0: ["", result]})
    status = reduce(app)
    assert status.message == "replica trainer/1 exited with code 3"
    assert "rank 1 exited with code 3" in status.error
    assert (count_restarts(app), app.started) == (3, 1.0)


def test_an_app_that_is_too_large_to_store_is_described_by_its_definition() -> None:
    app = app_snapshot("q:app-1", job("RUNNING", parameters={}), {}, {})
    assert [(role.spec.name, len(role.replicas)) for role in app.roles] == [("node", 2), ("node", 2)]
    assert app.app is not None and app.app.roles[0].image == "image"
    assert reduce(app).state is State.RUNNING
