# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""monarch_kubernetes without a cluster: the request, what pods and jobs say, what follows from it."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from torchx.runner import Runner
from torchx.specs import (
    AppDef,
    AppState,
    BindMount,
    DeviceMount,
    Resource,
    RetryPolicy,
    Role,
    VolumeMount,
    macros,
)
from torchx.specs.finder import ComponentValidationException

from tests.clusters.kubernetes.kubelet import expanded
from torchx_monarch.backends import appdef_codec
from torchx_monarch.backends.kubernetes import names, status
from torchx_monarch.backends.kubernetes.status import Attempt, Ended, KubernetesRole, Rules, WorkStatus, evaluate
from torchx_monarch.backends.outcome import RolePolicy
from torchx_monarch.backends.protocols import PLACEHOLDER
from torchx_monarch.model.job_result import JobResult, RankExit
from torchx_monarch.schedulers import monarch_kubernetes

OFFLINE: dict[str, Any] = {"mode": "job", "validate_spec": False, "namespace": "team"}
VOLCANO: dict[str, Any] = {"mode": "volcano", "validate_spec": False, "namespace": "team"}

KUBERNETES = ("1.29", "1.33", "1.37")
"""The oldest that will do, one between, and the newest whose schemas are there."""


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runner:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nosuch"))
    return Runner("torchx", {"monarch_kubernetes": monarch_kubernetes})


def trainer(name: str = "trainer", replicas: int = 2, **more: Any) -> Role:
    args = ["--nnodes", str(replicas), "--nproc-per-node", "2", "train.py"]
    resource = more.pop("resource", Resource(cpu=1, gpu=0, memMB=2048))
    return Role(name, "image", entrypoint="torchrun", args=args, num_replicas=replicas, resource=resource, **more)


def sh(command: str = "true", name: str = "reader", **more: Any) -> Role:
    return Role(name, "image", entrypoint="sh", args=["-c", command], **more)


def objects(runner: Runner, *roles: Role, name: str = "app", **cfg: Any) -> list[dict[str, Any]]:
    info = runner.dryrun(AppDef(name, list(roles)), "monarch_kubernetes", cfg={**OFFLINE, **cfg})
    found: list[dict[str, Any]] = info.request.objects
    return found


def jobs(runner: Runner, *roles: Role, **cfg: Any) -> list[dict[str, Any]]:
    return [one for one in objects(runner, *roles, **cfg) if one["kind"] == "Job"]


def container(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = job["spec"]["template"]["spec"]["containers"][0]
    return found


def environment(job: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container(job)["env"]}


# -- the request


@pytest.mark.parametrize("version", KUBERNETES)
def test_manifests_are_valid(runner: Runner, version: str) -> None:
    resource = Resource(
        cpu=4,
        gpu=8,
        memMB=4096,
        capabilities={"node.kubernetes.io/instance-type": "p5", "example.com/zone": "a"},
        devices={"vpc.amazonaws.com/efa": 4},
    )
    mounts = [BindMount("/a", "/b", True), VolumeMount("claim", "/c"), DeviceMount("/dev/fuse", "/dev/fuse", "rw")]
    more: dict[str, Any] = {"max_retries": 3, "port_map": {"tb": 6006}, "mounts": mounts}
    roles = [trainer(resource=resource, env={"A": "[FIELD_PATH]status.hostIP", "B": "$b"}, **more), sh()]
    made = objects(
        runner,
        *roles,
        kueue_queue="main",
        kueue_priority="high",
        service_account="runner",
        priority_class="urgent",
        image_secret="registry",
        node_selector={"disk": "ssd"},
        labels={"team": "a"},
        annotations={"note": "b"},
        ttl_seconds_after_finished=60,
    )
    assert [one["kind"] for one in made] == ["Service", "Secret", "Job", "Job"]
    for one in made:
        kubernetes_validate.validate(one, version, strict=True)
        assert one["metadata"]["labels"]["team"] == "a"
    job = made[2]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "main"
    assert job["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "high"
    assert job["spec"]["ttlSecondsAfterFinished"] == 60
    spec = job["spec"]["template"]["spec"]
    labels = {"node.kubernetes.io/instance-type": "p5", "example.com/zone": "a", "disk": "ssd"}
    assert spec["nodeSelector"] == labels
    assert (spec["serviceAccountName"], spec["priorityClassName"]) == ("runner", "urgent")
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    limits = container(job)["resources"]["limits"]
    assert (limits["nvidia.com/gpu"], limits["vpc.amazonaws.com/efa"], limits["cpu"]) == ("8", "4", "4000m")
    assert "/dev/shm" in [one["mountPath"] for one in container(job)["volumeMounts"]]


@pytest.mark.parametrize("version", KUBERNETES)
def test_volcano_pods_are_valid(runner: Runner, version: str) -> None:
    made = objects(runner, trainer("my-train"), sh(), **VOLCANO)
    assert [one["kind"] for one in made] == ["Secret", "Job"]
    for task in made[1]["spec"]["tasks"]:
        kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", **task["template"]}, version, strict=True)


def test_one_job_for_each_role_and_all_names_known_before_the_start(runner: Runner) -> None:
    first, second = jobs(runner, trainer("first", 500), trainer("Second_one", 3), rendezvous_port=20100)
    assert [(one["spec"]["completions"], one["spec"]["parallelism"]) for one in (first, second)] == [
        (500, 500),
        (3, 3),
    ]
    service = objects(runner, trainer())[0]
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    for index, job in enumerate((first, second)):
        name = job["metadata"]["name"]
        app_id = job["metadata"]["labels"][names.LABEL_APP]
        assert job["spec"]["completionMode"] == "Indexed"
        assert job["spec"]["template"]["spec"]["subdomain"] == app_id
        assert f"tls:@MONARCH_REPLICA0_{index}:{20100 + index}" in container(job)["command"]
        assert environment(job)[f"MONARCH_REPLICA0_{index}"] == f"{name}-0.{app_id}"
        assert environment(job).keys() >= {"MONARCH_REPLICA0_0", "MONARCH_REPLICA0_1"}
        assert environment(job)["TORCHX_RANK0_HOST"] == f"{first['metadata']['name']}-0.{app_id}"
        command = container(job)["command"]
        assert command[command.index("--replica") + 1] == "$(JOB_COMPLETION_INDEX)"
        assert container(job)["env"][0]["name"] == "JOB_COMPLETION_INDEX"
    assert second["metadata"]["name"].endswith("-second-one")


@pytest.mark.parametrize("app", ["a" * 80, "-_-App.1", "1.5B", "name with blanks/and ümlauts", "___"])
@pytest.mark.parametrize("roles", [("r",), ("x" * 70 + "a", "x" * 70 + "b"), ("A_b", "a-b"), ("--",)])
def test_names_are_valid_and_differ(app: str, roles: tuple[str, ...]) -> None:
    app_id = names.app_id(app)
    assert re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", app_id), app_id
    hosts = [f"{job}-{replica}" for job in names.job_names(app_id, roles) for replica in (0, 9999)]
    assert len(set(hosts)) == len(hosts)
    for host in hosts:
        assert re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", host) and len(host) <= 63, host


def test_words_and_values_arrive_as_they_are(runner: Runner) -> None:
    value = "a,b=c 'q' \"d\" $$HOME `x` \\ $$(HOME) %j $$$$ \n${replica_id}."
    job = jobs(runner, sh(f"echo {macros.replica_id} $$$$ $$(date) $${{X}}", env={"WORD": value}))[0]
    at_run = {"JOB_COMPLETION_INDEX": "7", "HOME": "wrong"}
    assert expanded(container(job)["command"][2], at_run) == "echo 7 $$ $(date) ${X}"
    assert expanded(environment(job)["WORD"], at_run) == "a,b=c 'q' \"d\" $HOME `x` \\ $(HOME) %j $$ \n7."


@pytest.mark.parametrize("cfg", [OFFLINE, VOLCANO])
def test_no_description_holds_the_credentials(runner: Runner, cfg: dict[str, Any]) -> None:
    from torchx_monarch.backends.protocols import with_credentials

    info = runner.dryrun(AppDef("app", [trainer(), sh()]), "monarch_kubernetes", cfg=cfg)
    assert [one["stringData"] for one in info.request.objects if one["kind"] == "Secret"] == [
        {"credentials": PLACEHOLDER}
    ]
    assert PLACEHOLDER in str(info)
    objects = with_credentials(info.request, "the-key").objects
    others = [one for one in objects if one["kind"] != "Secret"]
    (secret,) = (one for one in objects if one["kind"] == "Secret")
    assert secret["stringData"] == {"credentials": "the-key"}
    assert "the-key" not in json.dumps(others)
    pods = [others[-2]["spec"]["template"]] if cfg is OFFLINE else [others[-1]["spec"]["tasks"][0]["template"]]
    env = {one["name"]: one for one in pods[0]["spec"]["containers"][0]["env"]}
    app_id = secret["metadata"]["name"]
    assert env["MONARCH_CREDENTIALS"]["valueFrom"] == {"secretKeyRef": {"name": app_id, "key": "credentials"}}


def test_retries_of_hosts_and_of_others(runner: Runner) -> None:
    hosts, other = jobs(runner, trainer(max_retries=3), sh(max_retries=0))
    assert hosts["spec"]["backoffLimitPerIndex"] == 3
    assert "maxFailedIndexes" not in hosts["spec"]
    config_error, disruption = hosts["spec"]["podFailurePolicy"]["rules"]
    assert config_error == {"action": "FailIndex", "onExitCodes": {"operator": "In", "values": [78]}}
    assert disruption["action"] == "Ignore"
    assert other["spec"]["backoffLimitPerIndex"] == other["spec"]["maxFailedIndexes"] == 0
    assert other["spec"]["podFailurePolicy"]["rules"] == [config_error]
    assert hosts["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 40


def test_pod_overlay_is_laid_over(runner: Runner) -> None:
    overlay = {"spec": {"tolerations": [{"key": "gpu", "operator": "Exists"}], "nodeSelector": {"pool": "a"}}}
    job = jobs(runner, trainer(metadata={"kubernetes": overlay}), node_selector={"disk": "ssd"})[0]
    spec = job["spec"]["template"]["spec"]
    assert spec["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert spec["nodeSelector"] == {"pool": "a", "disk": "ssd"}


def test_volcano_names_replica_0_of_each_role(runner: Runner) -> None:
    made = objects(
        runner, trainer("my-train"), trainer("other", retry_policy=RetryPolicy.ROLE, max_retries=2), **VOLCANO
    )
    job = made[1]
    app_id = job["metadata"]["name"]
    tasks = {task["name"]: task["template"]["spec"]["containers"][0] for task in job["spec"]["tasks"]}
    for name, host in {"my-train-1": "my-train-0", "other-0": "other-0", "other-1": "other-0"}.items():
        env = {one["name"]: one.get("value") for one in tasks[name]["env"]}
        assert env[f"MONARCH_REPLICA0_{int(name.startswith('other'))}"] == f"{app_id}-{host}-0.{app_id}"
        assert env.keys() >= {"MONARCH_REPLICA0_0", "MONARCH_REPLICA0_1"}
        assert env["TORCHX_RANK0_HOST"] == f"{app_id}-my-train-0-0.{app_id}"
    assert job["spec"]["queue"] == "default"
    assert appdef_codec.unpack(job["metadata"]["annotations"][names.ANNOTATION_APP]) is not None


def test_dictionaries_are_read_from_the_command_line(runner: Runner) -> None:
    options = runner.scheduler_run_opts("monarch_kubernetes")
    cfg = options.cfg_from_str("node_selector=disk:ssd;example.com/zone:a,mode=job")
    assert cfg == {"node_selector": {"disk": "ssd", "example.com/zone": "a"}, "mode": "job"}


def test_too_large_apps_and_names_are_refused(runner: Runner) -> None:
    import random

    noise = "".join(random.choices("0123456789abcdefghijklmnopqrstuvwxyz", k=500_000))
    with pytest.raises(ValueError, match="takes [0-9]+ bytes when it is packed"):
        objects(runner, trainer(env={"NOISE": noise}))
    with pytest.raises(ValueError, match="host names have 63 at most; give the app or the role a shorter name"):
        objects(runner, trainer("x" * 60), **VOLCANO)
    with pytest.raises(ValueError, match="two roles of app 'app' are called 'trainer'"):
        objects(runner, trainer(), trainer())


def test_without_a_cluster_the_kubeconfig_is_named(runner: Runner) -> None:
    with pytest.raises(ComponentValidationException, match="no Kubernetes cluster is configured: .*nosuch"):
        objects(runner, trainer(), mode="auto")


# -- what pods say


def pod(phase: str = "Pending", **more: Any) -> dict[str, Any]:
    status = {"phase": phase, "startTime": "2026-11-20T10:00:00Z", **more}
    main = {"name": "main", "resources": {"limits": {"memory": "64M"}}}
    spec = {"containers": [main, {"name": "sidecar"}], "nodeName": "n1", "hostname": "app-r-0"}
    return {
        "metadata": {"name": "app-r-0-x", "creationTimestamp": "2026-11-20T10:00:00Z"},
        "spec": spec,
        "status": status,
    }


def ended(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    terminated = {"exitCode": code, "reason": reason, "message": message, "finishedAt": "2026-11-20T10:00:09Z"}
    sidecar = {"name": "sidecar", "state": {"terminated": {"exitCode": 0}}}
    return {"containerStatuses": [sidecar, {"name": "main", "state": {"terminated": terminated}}]}


@pytest.mark.parametrize(
    "reported, words",
    [
        (ended(3), "exited with code 3"),
        (ended(137), "was killed by signal 9 (SIGKILL)"),
        (ended(137, "OOMKilled"), "was killed for want of memory (OOMKilled), of which it had 64M (memMB)"),
        (ended(3, message="line\nlast words\n"), "exited with code 3: last words"),
        (ended(3, message='{"message": 1}'), "exited with code 3"),
        (
            ended(128, "StartError", "no such file: 'nosuch'"),
            "could not be started (StartError): no such file: 'nosuch'",
        ),
        (
            {"reason": "Evicted", "message": "The node was low on resource: memory."},
            "was ended by its node (Evicted: The node was low on resource: memory.)",
        ),
        ({"reason": "NodeLost"}, "was ended by its node (NodeLost)"),
        (
            {
                **ended(143),
                "conditions": [
                    {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "x"}
                ],
            },
            "was taken away by Kubernetes (PreemptionByScheduler: x)",
        ),
    ],
)
def test_why_a_pod_failed(reported: dict[str, Any], words: str) -> None:
    one = status.attempt(pod("Failed", **reported))
    assert status.KubernetesReplica("r", 0, [one], AppState.FAILED).failure == f"replica r/0 on node n1 {words}"


def test_why_a_pod_waits() -> None:
    waiting = {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}
    stuck = status.attempt(pod(containerStatuses=[{"name": "main", "state": {"waiting": waiting}}]))
    assert (stuck.waiting, stuck.stuck_since) == ("ImagePullBackOff: Back-off pulling image", 1795168800.0)
    creating = status.attempt(
        pod(containerStatuses=[{"name": "main", "state": {"waiting": {"reason": "ContainerCreating"}}}])
    )
    assert (creating.waiting, creating.stuck_since) == ("", 0.0)
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    nowhere = status.attempt(pod(conditions=[condition]))
    assert (nowhere.waiting, nowhere.stuck_since) == ("no node can take it (Unschedulable): 0/3 nodes", 0.0)


def test_restarts_of_ranks_are_those_of_all_containers_that_have_ended() -> None:
    now = ended(1, message=JobResult(1, "x" * 5000).error_file(4096, rank_restarts=2))
    now["containerStatuses"][1]["lastState"] = {"terminated": {"exitCode": 137, "message": '{"rank_restarts": 3}'}}
    one = status.attempt(pod("Failed", **now))
    assert one.rank_restarts == 5 and len(one.said) <= 4096
    assert one.error is not None and one.error["message"]["message"].startswith("xxx")
    killed = status.attempt(pod("Failed", **ended(137, message='{"rank_restarts": 1}')))
    assert (killed.rank_restarts, killed.error, killed.failure) == (1, None, "was killed by signal 9 (SIGKILL)")
    for message in ("[1]", "7", "last words", '{"rank_restarts": "1"}'):
        assert status.attempt(pod("Failed", **ended(1, message=message))).rank_restarts == 0


def test_numbers_of_indexes() -> None:
    assert status.indexes("0,2-4,9") == {0, 2, 3, 4, 9}
    assert status.indexes("") == status.indexes(None) == set()


# -- what follows

NOW = Rules(now=1000.0, grace=5.0, pull_timeout=60.0)
OPEN, GONE = WorkStatus(True), WorkStatus(False)


def role(
    name: str,
    *attempts: list[Attempt],
    work: WorkStatus = OPEN,
    retries: int = 0,
    fewest: int | None = None,
    sidecar: bool = False,
) -> KubernetesRole:
    replicas = [status.replica(name, number, each, work, retries) for number, each in enumerate(attempts)]
    return KubernetesRole(name, replicas, work, RolePolicy(len(attempts), fewest, sidecar))


def run(phase: str = "Running", at: float = 0.0, **more: Any) -> Attempt:
    return Attempt(f"p{at}", phase=phase, ended=at, failure="exited with code 1", **more)


def test_succeeds_when_all_roles_have_and_ends_sidecars() -> None:
    done = role("main", [run("Succeeded", 900.0)], work=WorkStatus(True, AppState.SUCCEEDED))
    found = evaluate([done, role("other", [run()])], NOW)
    assert (found.state, found.pending_decision) == (AppState.RUNNING, None)
    failed = evaluate([done, role("other", [run("Failed", 950.0)], work=WorkStatus(True, AppState.FAILED))], NOW)
    assert failed.state is AppState.FAILED and failed.cause is not None and failed.cause.role == "other"
    found = evaluate([done, role("other", [run()], sidecar=True)], NOW)
    assert (found.state, found.pending_decision) == (AppState.RUNNING, Ended(AppState.SUCCEEDED))
    from_socket = evaluate([done, role("other", [run("Failed", 950.0, stopping=True)], work=GONE, sidecar=True)], NOW)
    assert (from_socket.state, from_socket.cause) == (AppState.SUCCEEDED, None)


def test_leaves_a_job_alone_that_has_only_to_say_that_it_is_over() -> None:
    found = evaluate([role("main", [run("Succeeded", 900.0)])], NOW)
    assert (found.state, found.pending_decision) == (AppState.RUNNING, None)


def test_fails_when_nothing_lives_and_waits_for_the_hosts_before_it_ends_them() -> None:
    lost = [run("Failed", 995.0)]
    found = evaluate([role("main", lost, [run()])], NOW)
    assert (found.state, found.pending_decision) == (AppState.RUNNING, None)
    assert found.msg == "replica main/0 exited with code 1"
    later = evaluate([role("main", lost, [run()])], Rules(1011.0, 5.0, 60.0))
    assert later.pending_decision is not None and later.pending_decision.state is AppState.FAILED
    work = WorkStatus(True, AppState.FAILED)
    from_socket = evaluate([role("main", lost, [run("Failed", 996.0)], work=work)], NOW)
    assert from_socket.state is AppState.FAILED
    assert from_socket.cause is not None and from_socket.cause.id == 0


def test_waits_for_a_replacement() -> None:
    found = evaluate([role("main", [run("Failed", 995.0)], [run()], retries=1)], NOW)
    assert (found.state, found.cause) == (AppState.RUNNING, None)
    found = evaluate([role("main", [run("Failed", 995.0)], retries=1)], NOW)
    assert found.state is AppState.PENDING
    for_good = evaluate(
        [role("main", [run("Failed", 995.0)], work=WorkStatus(True, failed=frozenset({0})), retries=1)], NOW
    )
    assert for_good.cause is not None


def test_an_elastic_role_does_without_some() -> None:
    lost, well = run("Failed", 900.0), run("Succeeded", 950.0)
    from_socket = WorkStatus(True, AppState.FAILED)
    some = role("main", [run()], [lost], [run()], fewest=2)
    assert (evaluate([some], NOW).state, evaluate([some], NOW).pending_decision) == (AppState.RUNNING, None)
    done = role("main", [well], [lost], [well], work=from_socket, fewest=2)
    assert evaluate([done], NOW).state is AppState.SUCCEEDED
    too_few = role("main", [well], [lost], [lost], work=from_socket, fewest=2)
    assert evaluate([too_few], NOW).state is AppState.FAILED
    first = role("main", [lost], [well], [well], work=from_socket, fewest=2)
    assert evaluate([first], NOW).state is AppState.FAILED


def test_cancelled_is_cancelled_unless_all_was_over() -> None:
    rules = Rules(1000.0, 5.0, 60.0, Ended(AppState.CANCELLED))
    stopping = role("main", [run(stopping=True)], work=GONE)
    assert evaluate([stopping], rules).state is AppState.RUNNING
    assert evaluate([stopping], rules).pending_decision is None
    forgotten = evaluate([role("main", [run()], work=GONE)], rules)
    assert forgotten.pending_decision == Ended(AppState.CANCELLED)
    assert evaluate([role("main", [], work=GONE)], rules).state is AppState.CANCELLED
    done = role("main", [run("Succeeded", 900.0)], work=WorkStatus(True, AppState.SUCCEEDED))
    assert evaluate([done], rules).state is AppState.SUCCEEDED


def test_a_pod_that_can_never_start_fails_the_app_after_a_while() -> None:
    stuck = Attempt("p", waiting="ErrImagePull: not found", stuck_since=950.0)
    found = evaluate([role("main", [stuck], [run()])], NOW)
    assert (found.state, found.msg) == (AppState.RUNNING, "replica main/0: ErrImagePull: not found")
    later = evaluate([role("main", [stuck])], Rules(1020.0, 5.0, 60.0))
    assert later.pending_decision == Ended(AppState.FAILED, "replica main/0 cannot start: ErrImagePull: not found")
    queued = WorkStatus(True, word="waits for Kueue to admit it to the queue a")
    assert evaluate([role("main", [], work=queued)], NOW).msg == "role main waits for Kueue to admit it to the queue a"


def test_the_cause_is_said_by_who_does_not_blame_another() -> None:
    def said(message: str, consequence: bool) -> str:
        return JobResult(1, message, consequence=consequence).error_file()

    lost = run("Failed", 990.0, said=said("host 1 lost replica 0", True))
    cause = run("Failed", 995.0, said=said("rank 3 failed", False))
    from_socket = WorkStatus(True, AppState.FAILED)
    assert "rank 3 failed" in status.root_cause([role("main", [lost], [cause], [run("Failed", 1.0)], work=from_socket)])
    assert status.root_cause([role("main", [run("Failed", 1.0, said="last words")], work=from_socket)]) == ""


def test_termination_messages_fit() -> None:
    error = {"message": {"message": "x" * 3000, "extraInfo": {"py_callstack": "begin" + "ü" * 9000 + "end"}}}
    cause = RankExit(0, 0, 0, "n", 1, 1, time.time(), error=error)
    text = JobResult(1, cause.describe(), cause).error_file(4096)
    assert len(text) <= 4096
    read = json.loads(text)["message"]
    assert read["message"] == cause.describe()
    assert read["extraInfo"]["py_callstack"].endswith("end")
    assert len(JobResult(1, "y" * 9000).error_file(4096)) <= 4096
    assert json.loads(JobResult(1, "y" * 9000).error_file())["message"]["message"] == "y" * 9000
