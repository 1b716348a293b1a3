# SPDX-License-Identifier: BSD-3-Clause
"""monarch_kubernetes with mode=volcano: Volcano's kind on a real API server, a stand-in for its controller."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from torchx.specs import AppState

from tests.clusters.kubernetes.apps import Apps
from tests.clusters.kubernetes.test_apps import WAITS
from tests.waits import until
from torchx_monarch.model.role_spec import mark_sidecar

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

GROUP = "batch.volcano.sh"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"

SAYS = """
    import os, sys
    env = os.environ
    print("rank", env["RANK"], "of", env["WORLD_SIZE"], "on", os.uname().nodename, env["MASTER_ADDR"], flush=True)
    print("weird", repr(env["WEIRD"]), file=sys.stderr, flush=True)
    print("secret", env.get("MONARCH_CREDENTIALS"), flush=True)
"""

LAST = """
    import socket, time
    while env["WORLD_SIZE"] == "4":
        try:
            socket.getaddrinfo("go", None)
            break
        except OSError:
            time.sleep(0.2)
"""
"""Has the world of four, whose role decides, wait for the name ``go``."""


@pytest.fixture
def volcano(apps: Apps) -> Iterator[Apps]:
    """Apps on a cluster that knows the group and kind, without Volcano's own schema."""
    part = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version: dict[str, Any] = {"name": "v1alpha1", "served": True, "storage": True, "subresources": {"status": {}}}
    version["schema"] = {"openAPIV3Schema": {"type": "object", "properties": {"spec": part, "status": part}}}
    names = {"kind": "Job", "plural": "jobs", "singular": "job", "listKind": "JobList"}
    spec = {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]}
    kind = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
    there = apps.api.find(f"{CRDS}/jobs.{GROUP}") is not None
    if not there and apps.cluster.foreign:
        pytest.skip("the cluster of TEST_KUBECONFIG knows no Volcano jobs, and tests do not change what is not theirs")
    if not there:
        apps.api.create(CRDS, {**kind, "metadata": {"name": f"jobs.{GROUP}"}, "spec": spec})
        until(lambda: apps.api.find(f"/apis/{GROUP}/v1alpha1") is not None, "the kind")
    yield apps
    for app in apps.runner.list("monarch_kubernetes", cfg={"namespace": apps.namespace}):
        apps.runner.delete(app.app_handle)
    until(lambda: apps.left() == [], "the end of all objects")
    if not there:
        apps.api.delete(f"{CRDS}/jobs.{GROUP}")
        until(lambda: apps.api.find(f"/apis/{GROUP}/v1alpha1") is None, "the end of the kind")


def test_volcano_runs_two_roles_and_everything_is_known(volcano: Apps) -> None:
    apps = volcano
    env = {"WEIRD": "a,b $$HOME"}
    path = apps.program(SAYS + LAST)
    main = apps.torchrun(path, name="my-train", env=env)
    handle = apps.run(main, apps.torchrun(path, name="other", nproc=1, env=env), mode="auto")
    apps.until(lambda: apps.states(handle)["other/1"] is AppState.SUCCEEDED, "the end of the other role", handle)
    apps.tell("go")
    status = apps.wait(handle, AppState.SUCCEEDED)
    app_id = handle.rpartition(":")[2]
    hosts = [replica.hostname for replica in status.roles[0].replicas]
    assert hosts == [f"{app_id}-my-train-{k}-0.{app_id}.{apps.namespace}.svc" for k in (0, 1)]
    for rank in range(4):
        assert f"rank {rank} of 4" in apps.log(handle, "my-train")
    for rank in range(2):
        assert f"rank {rank} of 2" in apps.log(handle, "other")
    (listed,) = apps.runner.list("monarch_kubernetes", cfg={"namespace": apps.namespace})
    assert (listed.app_handle, listed.state) == (handle, AppState.SUCCEEDED)
    assert [role.name for role in apps.described(handle).roles] == ["my-train", "other"]
    assert apps.described(handle).roles[0].args == main.args


def test_volcano_jobs_are_cancelled_and_fail_and_end_without_their_sidecars(volcano: Apps) -> None:
    apps = volcano
    handle = apps.run(apps.torchrun(apps.program(WAITS)), mode="volcano")
    apps.until(lambda: apps.log(handle).count("attempt 0") == 4, "the ranks", handle)
    apps.torchx("cancel", handle)
    apps.wait(handle, AppState.CANCELLED)
    failing = apps.program('import os\nassert os.environ["RANK"] != "3", "boom"\nimport time\ntime.sleep(1000)')
    handle = apps.run(apps.torchrun(failing), mode="volcano")
    status = apps.wait(handle, AppState.FAILED)
    assert "AssertionError: boom" in json.loads(status.structured_error_msg)["message"]["message"]
    apps.runner.delete(handle)
    until(lambda: apps.runner.status(handle) is None, "its end")
    reader = apps.role("sleep", "1000", name="reader")
    mark_sidecar(reader)
    handle = apps.run(apps.role("true", name="main"), reader, mode="volcano")
    apps.wait(handle, AppState.SUCCEEDED)
    assert apps.states(handle)["reader/0"] is AppState.CANCELLED
