# SPDX-License-Identifier: BSD-3-Clause
"""What an API server does on a bad day, on a fake of the wire: errors, disconnects, expired lists, broken streams."""

from __future__ import annotations

import contextlib
import copy
import http.server
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from torchx.runner import Runner
from torchx.specs import AppDef, AppState, Role
from torchx.specs.finder import ComponentValidationException

from torchx_monarch.backends.kubernetes import connection
from torchx_monarch.backends.kubernetes.connection import Api, KubernetesError
from torchx_monarch.schedulers import monarch_kubernetes

Answer = tuple[int, Any]
"""Status and body; bytes are cut off where they end, and status 0 hangs up without a word."""


class Wire:
    """An API server that answers from a script, and without one from a cluster as it should be.

    Attributes:
        script: for the requests that come, in turn; None for what the cluster says.
        asked: the requests that came: method and path.
        objects: the cluster, by the objects' paths.
    """

    def __init__(self) -> None:
        self.script: list[Answer | None] = []
        self.asked: list[str] = []
        self.objects: dict[str, Any] = {}
        wire = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def _do(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                wire.asked.append(f"{self.command} {self.path}")
                scripted = wire.script.pop(0) if wire.script else None
                status, said = scripted or wire.cluster(self.command, self.path, json.loads(body or "{}"))
                if status == 0:
                    if said == "after":  # it was done; only the answer is lost
                        wire.cluster(self.command, self.path, json.loads(body or "{}"))
                    self.close_connection = True
                    return
                data = said if isinstance(said, bytes) else json.dumps(said).encode()
                self.send_response(status)
                if status == 429:
                    self.send_header("Retry-After", "0")
                if isinstance(said, bytes):
                    self.send_header("Transfer-Encoding", "chunked")
                    self.end_headers()
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                    self.close_connection = True
                    return
                with contextlib.suppress(BrokenPipeError):  # who asked was interrupted meanwhile
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            do_GET = do_POST = do_PATCH = do_DELETE = _do

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def cluster(self, method: str, path: str, body: dict[str, Any]) -> Answer:
        """What a cluster answers that keeps all it is given."""
        where, _, query = path.partition("?")
        if method == "POST":
            name = f"{where}/{body['metadata']['name']}"
            if name in self.objects:
                return 409, {"message": f"{name} already exists", "reason": "AlreadyExists"}
            body["metadata"] |= {"uid": name, "creationTimestamp": "2026-11-20T10:00:00Z"}
            if "dryRun" not in query:
                self.objects[name] = body
            return 201, body
        if method == "DELETE":
            return 200, self.objects.pop(where, {})
        if where in self.objects:
            return 200, self.objects[where]
        items = [manifest for name, manifest in self.objects.items() if name.rpartition("/")[0] == where]
        known = where.rpartition("/")[2] in ("events", "jobs", "pods", "services", "secrets", "v1alpha1")
        return (200, {"apiVersion": "v1", "kind": "List", "items": items}) if known else (404, {"message": "not found"})

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def wire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    wire = Wire()
    config = {
        "current-context": "fake",
        "clusters": [{"name": "fake", "cluster": {"server": wire.url}}],
        "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "me"}}],
        "users": [{"name": "me", "user": {"token": "t"}}],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setattr(connection, "_WAITS", (0.01,) * 4)
    yield wire
    wire.close()


@pytest.fixture
def api(wire: Wire) -> Iterator[Api]:
    api = Api.from_environment()
    yield api
    api.close()


@pytest.fixture
def runner(wire: Wire) -> Iterator[Runner]:
    with Runner("torchx", {"monarch_kubernetes": monarch_kubernetes}) as runner:
        yield runner


FAULTS = [(429, {"message": "slow down"}), (500, {"message": "etcd"}), (503, b"<html>"), (0, "before")]


@pytest.mark.parametrize("fault", FAULTS)
def test_an_answer_that_failed_is_asked_for_again(wire: Wire, api: Api, fault: Answer) -> None:
    wire.objects["/api/v1/namespaces/n/services/a"] = {"it": 1}
    wire.script = [fault, fault]
    assert api.get("/api/v1/namespaces/n/services/a") == {"it": 1}
    assert len(wire.asked) == 3


def test_a_server_that_goes_on_failing_is_reported(wire: Wire, api: Api) -> None:
    wire.script = [(500, {"message": "etcdserver: request timed out"})] * 9
    with pytest.raises(
        KubernetesError, match=f"cluster at {wire.url} refuses: etcdserver: request timed out"
    ) as caught:
        api.get("/x")
    assert caught.value.status == 500 and len(wire.asked) == 5
    wire.close()
    api.close()
    with pytest.raises(KubernetesError, match=f"{wire.url}, which the kubeconfig names, cannot be reached"):
        api.get("/x")


def test_what_does_not_help_is_not_tried_again(wire: Wire, api: Api) -> None:
    for status, words in ((401, "see the user, credentials"), (403, "see the user, credentials"), (422, "bad name")):
        wire.asked.clear()
        wire.script = [(status, {"message": "bad name"})]
        with pytest.raises(KubernetesError, match=words):
            api.get("/x")
        assert len(wire.asked) == 1


def test_an_object_whose_answer_was_lost_is_not_made_twice(wire: Wire, api: Api) -> None:
    wire.script = [(0, "after")]
    made = api.create("/api/v1/namespaces/n/secrets", {"metadata": {"name": "a"}})
    assert made["metadata"]["uid"] and [word.split()[0] for word in wire.asked] == ["POST", "POST", "GET"]
    with pytest.raises(KubernetesError, match="already exists"):
        api.create("/api/v1/namespaces/n/secrets", {"metadata": {"name": "a"}})


def submitted(runner: Runner, **cfg: Any) -> str:
    # Hosts of one role need no owner, which would send requests of its own.
    role = Role("r", image="i", entrypoint="torchrun", args=["--nnodes", "2", "train.py"], num_replicas=2)
    handle: str = runner.run(AppDef("app", [role]), "monarch_kubernetes", cfg=cfg, workspace=None)
    return handle


def pod(handle: str, index: int, phase: str, name: str = "p") -> dict[str, Any]:
    app = handle.rpartition(":")[2]
    labels = {"torchx-monarch/app": app, "torchx-monarch/role": "0"}
    metadata = {"name": f"{name}{index}", "labels": labels, "creationTimestamp": "2026-11-20T10:00:00Z"}
    metadata["annotations"] = {"batch.kubernetes.io/job-completion-index": str(index)}
    return {"metadata": metadata, "spec": {"containers": [{}]}, "status": {"phase": phase}}


PODS = "/api/v1/namespaces/default/pods"


def test_a_job_is_known_through_all_faults(wire: Wire, runner: Runner) -> None:
    wire.script = [answer for fault in FAULTS for answer in (fault, fault, None)]
    handle = submitted(runner)
    (job,) = [manifest for name, manifest in wire.objects.items() if "/jobs/" in name]
    assert job["spec"]["completionMode"] == "Indexed" and job["spec"]["backoffLimitPerIndex"] == 0
    assert len(wire.objects) == 3
    for index in (0, 1):
        wire.objects[f"{PODS}/p{index}"] = pod(handle, index, "Succeeded")
    job["status"] = {"conditions": [{"type": "Complete", "status": "True"}], "completedIndexes": "0-1"}
    wire.script = list(FAULTS)
    status = runner.status(handle)
    assert status is not None and status.state is AppState.SUCCEEDED
    wire.script = [(403, {"message": "no"})]
    with pytest.raises(ComponentValidationException, match="see the user, credentials and rights of the kubeconfig"):
        runner.status(handle)


def test_a_submission_that_fails_midway_leaves_nothing(wire: Wire, runner: Runner) -> None:
    wire.script = [None, None, (403, {"message": "jobs.batch is forbidden"})]
    with pytest.raises(ComponentValidationException, match=r"jobs.batch is forbidden.*credentials and rights"):
        submitted(runner, validate_spec=False)
    assert wire.objects == {}


@pytest.mark.parametrize("kind", ["secrets", "services", "jobs"])
def test_a_submission_that_is_interrupted_leaves_nothing(wire: Wire, runner: Runner, kind: str) -> None:
    """By Ctrl-C, when an object has been made and its answer is not there yet."""
    plain = wire.cluster

    def cluster(method: str, path: str, body: dict[str, Any]) -> Answer:
        answer = plain(method, path, body)
        if method == "POST" and path.endswith(kind):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        return answer

    wire.cluster = cluster  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        submitted(runner, validate_spec=False)
    assert wire.objects == {}


def without_jobs(objects: dict[str, Any]) -> dict[str, Any]:
    """The objects after somebody has deleted the jobs, and Kubernetes what it deletes with the last owner."""
    kept = {path: manifest for path, manifest in objects.items() if manifest["kind"] != "Job"}
    owners = {
        path: [own["uid"] for own in manifest["metadata"].get("ownerReferences") or []]
        for path, manifest in kept.items()
    }
    return {path: manifest for path, manifest in kept.items() if not owners[path] or kept.keys() & owners[path]}


def test_a_submission_that_was_killed_is_listed_and_deleted(wire: Wire, runner: Runner) -> None:
    """Whatever of its objects has been made by then, and has got its owners, and also if the jobs are gone."""
    plain, left = wire.cluster, list[dict[str, Any]]()

    def cluster(method: str, path: str, body: dict[str, Any]) -> Answer:
        answer = plain(method, path, body)
        if method == "PATCH":
            wire.objects[path]["metadata"] |= body["metadata"]
        if method in ("POST", "PATCH"):
            left.append(copy.deepcopy(wire.objects))
        return answer

    wire.cluster = cluster  # type: ignore[method-assign]
    submitted(runner, validate_spec=False)
    assert len(left) == 5
    assert without_jobs(left[-1]) == {}
    for wire.objects in [*map(copy.deepcopy, left), *map(without_jobs, left)]:
        found = runner.list("monarch_kubernetes")
        assert len(found) == bool(wire.objects)
        for app in found:
            runner.delete(app.app_handle)
        assert wire.objects == {}


def test_what_could_not_be_removed_is_said(wire: Wire, runner: Runner, caplog: pytest.LogCaptureFixture) -> None:
    wire.script = [None, None, (403, {"message": "no"}), (403, {"message": "secrets is forbidden"})]
    with pytest.raises(ComponentValidationException, match="refuses: no .see the user"):
        submitted(runner, validate_spec=False)
    (left,) = [name.rpartition("/")[2] for name in wire.objects]
    assert f"to be done by `kubectl delete secret {left} --namespace default`" in caplog.text
    assert "secrets is forbidden" in caplog.text


def _without(config: dict[str, Any], part: str, key: str) -> None:
    del config[part][0][part.removesuffix("s")][key]


KUBECONFIGS: list[tuple[bytes | Callable[[dict[str, Any]], object], str]] = [
    (b"{this is: [not yaml\n", "no Kubernetes cluster is configured: .*expected ',' or"),
    (b"\x00\x01\xff\xfe", "no Kubernetes cluster is configured: .*"),
    (b"\xff\xfe\x00", "no Kubernetes cluster is configured: .*"),
    (b"[1, 2]", "no Kubernetes cluster is configured: .*"),
    (b"", "no Kubernetes cluster is configured: .* file is empty. Name"),
    (
        lambda kubeconfig: kubeconfig.update({"current-context": "nosuch"}),
        "configured: .*object with name nosuch in .*contexts list",
    ),
    (lambda kubeconfig: _without(kubeconfig, "clusters", "server"), "configured: .*its server is '', which is no URL"),
    (
        lambda kubeconfig: kubeconfig["clusters"][0]["cluster"].update(server="htp:/x y"),
        "its server is 'htp:/x y', which is no URL",
    ),
    (
        lambda kubeconfig: kubeconfig["users"][0]["user"].update(token="a\nb"),
        "the token of the kubeconfig holds a line end",
    ),
]


@pytest.mark.parametrize("change, words", KUBECONFIGS)
def test_a_kubeconfig_that_is_none_is_told(
    wire: Wire, tmp_path: Path, change: bytes | Callable[[dict[str, Any]], object], words: str
) -> None:
    path = tmp_path / "config"
    if isinstance(change, bytes):
        path.write_bytes(change)
    else:
        config = yaml.safe_load(path.read_text())
        change(config)
        path.write_text(yaml.safe_dump(config))
    with pytest.raises(KubernetesError, match=words):
        Api.from_environment().get("/x")


@pytest.mark.parametrize("app_id", ["default/pods:x", "..:x", "Default:x", "default:a/b", "default:", ":x", "x"])
def test_a_handle_that_can_be_nobodys_is_not_asked_for(wire: Wire, runner: Runner, app_id: str) -> None:
    assert runner._scheduler("monarch_kubernetes").describe(app_id) is None
    assert wire.asked == []


@pytest.mark.scenario("log follow, since, until", wire="fake")
def test_a_log_goes_on_where_its_stream_broke(wire: Wire) -> None:
    from datetime import datetime, timezone

    scheduler = monarch_kubernetes("torchx")
    role = Role("r", image="i", entrypoint="sh", args=[])
    with Runner("torchx", {"monarch_kubernetes": monarch_kubernetes}) as runner:
        handle = submitted(runner)
    wire.objects[f"{PODS}/p0"] = pod(handle, 0, "Running")
    wire.objects[f"{PODS}/p1"] = pod(handle, 1, "Running")
    first = b"2026-11-20T10:00:01.5Z one\n2026-11-20T10:00:01.500000001Z two\n"
    whole = first + b"2026-11-20T10:00:02Z three\n"
    logs: list[Answer] = [(200, first), (200, whole), (200, whole)]
    plain: Callable[[str, str, dict[str, Any]], Answer] = wire.cluster

    def cluster(method: str, path: str, body: dict[str, Any]) -> Answer:
        if "/log" not in path:
            return plain(method, path, body)
        said = logs.pop(0)
        if not logs:
            for index in (0, 1):
                wire.objects[f"{PODS}/p{index}"]["status"]["phase"] = "Succeeded"
            (job,) = [manifest for name, manifest in wire.objects.items() if "/jobs/" in name]
            job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
            logs.append((200, whole))
        return said

    wire.cluster = cluster  # type: ignore[method-assign]
    app_id = handle.rpartition("/")[2]
    assert list(scheduler.log_iter(app_id, role.name, should_tail=True)) == ["one\n", "two\n", "three\n"]
    assert any("sinceTime=2026-11-20T10%3A00%3A01Z" in word for word in wire.asked)
    since = datetime(2026, 11, 20, 10, 0, 1, 600000, timezone.utc)
    assert list(scheduler.log_iter(app_id, role.name, since=since)) == ["three\n"]
    assert list(scheduler.log_iter(app_id, role.name, until=since)) == ["one\n", "two\n"]
    scheduler.close()
