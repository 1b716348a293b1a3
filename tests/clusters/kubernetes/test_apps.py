# SPDX-License-Identifier: BSD-3-Clause
"""monarch_kubernetes on a real API server: apps run, fail, are looked at, cancelled and deleted."""

from __future__ import annotations

import json

import pytest
from torchx.specs import NONE, AppState
from torchx.specs.finder import ComponentValidationException

from tests.clusters.kubernetes.apps import NAME, Apps
from tests.waits import until
from torchx_monarch.model.role_spec import mark_sidecar

# The first test brings the cluster up, and may have to build it.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

WAITS = """
    import os, socket, sys, time

    def told():
        try:
            return bool(socket.getaddrinfo("go", None))
        except OSError:
            return False

    rank = os.environ["RANK"]
    print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], "rank", rank, flush=True)
    if not told():
        while not told():
            time.sleep(0.2)
        if rank in sys.argv[1:]:
            os.kill(os.getppid(), 9)  # the host
        time.sleep(1000)
"""
"""Waits for the name ``go``; then the ranks named by its arguments kill their hosts. A later one ends at once."""


def test_restarts_of_ranks_count_also_those_of_a_host_that_was_killed(apps: Apps) -> None:
    text = f"""
{WAITS}
    if not told() and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("once")
"""
    # Those of the first host wait for the name in their second attempt alone.
    text = text.replace("if not told():", 'if not told() and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":')
    handle = apps.run(apps.torchrun("--max-restarts", "2", apps.program(text), "0", nproc=1, max_retries=1))
    apps.until(lambda: apps.log(handle).count("attempt 1") == 2, "the second attempt", handle)
    apps.tell("go")
    assert apps.wait(handle, AppState.SUCCEEDED).num_restarts == 2  # one of each
    log = apps.log(handle)
    # In the first attempt one rank may have been stopped before it had printed.
    assert log.count("attempt 0") in (3, 4), log


def test_pods_that_are_not_let_in_are_told(apps: Apps) -> None:
    path = f"/api/v1/namespaces/{apps.namespace}/resourcequotas"
    apps.api.create(path, {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}})
    until(lambda: "used" in apps.api.get(f"{path}/none").get("status", {}), "the quota")
    handle = apps.run(apps.role("true", replicas=2))
    apps.until(lambda: "exceeded quota: none" in apps.status(handle).msg, "why", handle)
    status = apps.status(handle)
    assert status.state is AppState.PENDING and status.msg.startswith("role trainer gets no pods: pods ")
    apps.api.delete(f"{path}/none")
    assert apps.wait(handle, AppState.SUCCEEDED).msg == NONE


def test_an_image_that_is_not_there_is_told_and_ends_the_app(apps: Apps) -> None:
    handle = apps.run(
        apps.role("true", image="registry/missing:1"), apps.role("sleep", "1000", name="b"), pull_timeout=2
    )
    apps.until(lambda: "ErrImagePull" in apps.status(handle).msg or apps.status(handle).is_terminal(), "why", handle)
    status = apps.wait(handle, AppState.FAILED)
    assert "replica trainer/0 cannot start: " in status.msg and "registry/missing:1" in status.msg
    assert "cannot start" in json.loads(apps.torchx("status", "--json", handle))["msg"]


def test_what_is_no_host_fails_with_its_last_words_and_ends_the_others(apps: Apps) -> None:
    reader = apps.role(
        "sh", "-c", "test $$JOB_COMPLETION_INDEX = 0 && sleep 1000; echo last words >&2; exit 3", replicas=2
    )
    handle = apps.run(reader)
    status = apps.wait(handle, AppState.FAILED)
    assert status.msg.endswith("exited with code 3; its last output: last words") and "replica trainer/1" in status.msg


def test_a_sidecar_ends_with_the_others(apps: Apps) -> None:
    main = apps.role("sh", "-c", "sleep 1", name="main")
    other = apps.torchrun(apps.program(WAITS), name="other_one", replicas=1, nproc=1)
    mark_sidecar(other)
    handle = apps.run(main, other)
    apps.wait(handle, AppState.SUCCEEDED)
    assert apps.states(handle) == {"main/0": AppState.SUCCEEDED, "other_one/0": AppState.CANCELLED}
    assert [
        job["metadata"]["name"]
        for job in apps.api.items(f"/apis/batch/v1/namespaces/{apps.namespace}/jobs", "torchx-monarch/app")
    ] == [f"{handle.rpartition(':')[2]}-main"]


def test_all_goes_some_time_after_the_end(apps: Apps) -> None:
    handle = apps.run(apps.role("true"), ttl_seconds_after_finished=1)
    apps.until(lambda: apps.runner.status(handle) is None, "the deletion by Kubernetes", handle)
    apps.until(lambda: apps.left() == [], "the owned objects", handle)


def test_what_is_refused_leaves_nothing(apps: Apps) -> None:
    with pytest.raises(ComponentValidationException, match=f'namespaces "{apps.namespace}-no" not found'):
        apps.run(apps.role("true"), namespace=f"{apps.namespace}-no")
    # 422, at the dry run, and after the Secret and the Service were made.
    bad = apps.role("true", port_map={"a name that is far too long for a port": 1})
    with pytest.raises(ComponentValidationException, match="refuses: .*must be no more than 15 characters"):
        apps.run(bad)
    with pytest.raises(ComponentValidationException, match="must be no more than 15 characters"):
        apps.run(bad, validate_spec=False)
    assert apps.left() == []
    # 409: the same request again.
    from torchx.specs import AppDef

    cfg = {"namespace": apps.namespace}
    info = apps.runner.dryrun(AppDef("app", [apps.role("true")]), NAME, cfg=cfg)
    handle = apps.runner.schedule(info)
    with pytest.raises(ComponentValidationException, match="already exists"):
        apps.runner.schedule(info)
    apps.wait(handle, AppState.SUCCEEDED)  # it was not touched
