# SPDX-License-Identifier: BSD-3-Clause
"""monarch_kubernetes without a cluster: the request, what pods and jobs say, what follows from it."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import urllib3
from torchx.runner import Runner
from torchx.specs import AppDef, BindMount, DeviceMount, InvalidRunConfigException, Resource, Role, VolumeMount
from torchx.specs.finder import ComponentValidationException

from torchx_monarch.backends.core.backend import read_undamaged
from torchx_monarch.backends.core.snapshot import AppSnapshot, Outcome, RoleSnapshot
from torchx_monarch.backends.core.state import AppStatus, count_restarts, pending_stop, reduce
from torchx_monarch.backends.core.state_files import DamagedFileError
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.kubernetes import request, snapshot
from torchx_monarch.backends.kubernetes.connection import Api
from torchx_monarch.backends.kubernetes.request import with_credentials
from torchx_monarch.backends.kubernetes.snapshot import AppObjects, Attempt, JobReport
from torchx_monarch.model.host_result import HostResult
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.model.state import State
from torchx_monarch.schedulers import monarch_kubernetes
from torchx_monarch.system.line_output import MAX_LINE_BYTES

OFFLINE: dict[str, Any] = {"validate_spec": False, "namespace": "team"}

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
    return [manifest for manifest in objects(runner, *roles, **cfg) if manifest["kind"] == "Job"]


def container(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = job["spec"]["template"]["spec"]["containers"][0]
    return found


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
        service_account="runner",
        priority_class="urgent",
        image_secret="registry",
        node_selector={"disk": "ssd"},
        exclude_nodes="node7+node9",
        tolerations=["pool=a100:NoSchedule", "spot:NoExecute", "any"],
        labels={"team": "a", "kueue.x-k8s.io/priority-class": "high"},
        annotations={"note": "b"},
        ttl_seconds_after_finished=60,
    )
    assert [manifest["kind"] for manifest in made] == ["Service", "Secret", "Job", "Job"]
    for manifest in made:
        kubernetes_validate.validate(manifest, version, strict=True)
        assert manifest["metadata"]["labels"]["team"] == "a"
    job = made[2]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "main"
    assert job["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "high"
    assert job["spec"]["ttlSecondsAfterFinished"] == 60
    spec = job["spec"]["template"]["spec"]
    labels = {"node.kubernetes.io/instance-type": "p5", "example.com/zone": "a", "disk": "ssd"}
    assert spec["nodeSelector"] == labels
    assert (spec["serviceAccountName"], spec["priorityClassName"]) == ("runner", "urgent")
    assert spec["tolerations"] == [
        {"key": "pool", "operator": "Equal", "value": "a100", "effect": "NoSchedule"},
        {"key": "spot", "operator": "Exists", "effect": "NoExecute"},
        {"key": "any", "operator": "Exists"},
    ]
    (term,) = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    (rule,) = term["matchExpressions"]
    assert rule == {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["node7", "node9"]}
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    limits = container(job)["resources"]["limits"]
    assert (limits["nvidia.com/gpu"], limits["vpc.amazonaws.com/efa"], limits["cpu"]) == ("8", "4", "4000m")
    assert "/dev/shm" in [mount["mountPath"] for mount in container(job)["volumeMounts"]]


@pytest.mark.parametrize("app", ["a" * 80, "-_-App.1", "1.5B", "name with blanks/and ümlauts", "___"])
@pytest.mark.parametrize("roles", [("r",), ("x" * 70 + "a", "x" * 70 + "b"), ("A_b", "a-b"), ("--",)])
def test_names_are_valid_and_differ(app: str, roles: tuple[str, ...]) -> None:
    app_id = request.new_app_id(app)
    assert re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", app_id), app_id
    hosts = [f"{job}-{replica}" for job in request.job_names(app_id, roles) for replica in (0, 9999)]
    assert len(set(hosts)) == len(hosts)
    for host in hosts:
        assert re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", host) and len(host) <= 63, host


def test_only_the_secret_that_is_created_holds_the_credentials(runner: Runner) -> None:
    roles = [trainer(env={"MONARCH_CREDENTIALS": "of the job around"}), sh()]
    info = runner.dryrun(AppDef("app", roles), "monarch_kubernetes", cfg=OFFLINE)
    assert "(made when the job is submitted)" in str(info)
    objects = with_credentials(info.request.objects, "the-key")
    assert "the-key" not in str(info)
    others = [manifest for manifest in objects if manifest["kind"] != "Secret"]
    (secret,) = (manifest for manifest in objects if manifest["kind"] == "Secret")
    assert secret["stringData"] == {"credentials": "the-key"}
    assert "the-key" not in json.dumps(others)
    app_id = secret["metadata"]["name"]
    reference = {"secretKeyRef": {"name": app_id, "key": "credentials"}}
    pods = [other["spec"]["template"] for other in others if other["kind"] == "Job"]
    for index, pod in enumerate(pods):
        env = [
            variable["valueFrom"]
            for variable in pod["spec"]["containers"][0]["env"]
            if variable["name"] == "MONARCH_CREDENTIALS"
        ]
        assert env == ([reference] if index < len(pods) - 1 else [])  # the last one runs no host


def test_images_of_workspaces_are_named_as_they_will_be_pushed(runner: Runner) -> None:
    role = trainer()
    role.image = "sha256:abc"
    with pytest.raises(
        ComponentValidationException, match="name a repository to push it to in the run option image_repo"
    ):
        objects(runner, role)
    info = runner.dryrun(AppDef("app", [role]), "monarch_kubernetes", cfg={**OFFLINE, "image_repo": "registry/a"})
    assert info.images == {"sha256:abc": ("registry/a", "abc")}
    service, _, job = info.request.objects
    assert container(job)["image"] == "registry/a:abc"
    described = SubmittedApp.unpack(service["metadata"]["annotations"][request.ANNOTATION_APP])
    assert described.app.roles[0].image == "registry/a:abc"


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
    options: dict[str, Any] = {"node_selector": {"disk": "ssd"}, "tolerations": ["spot=:NoExecute"]}
    job = jobs(runner, trainer(metadata={"kubernetes": overlay}), **options)[0]
    spec = job["spec"]["template"]["spec"]
    spot = {"key": "spot", "operator": "Equal", "value": "", "effect": "NoExecute"}
    assert spec["tolerations"] == [{"key": "gpu", "operator": "Exists"}, spot]
    assert spec["nodeSelector"] == {"pool": "a", "disk": "ssd"}


@pytest.mark.parametrize(
    ("taint", "said"),
    [("a=b=c", "'a=b=c' is not of the form KEY=VALUE:EFFECT"), (":NoSchedule", "':NoSchedule' is not of the form")],
)
def test_what_is_no_taint_is_refused(runner: Runner, taint: str, said: str) -> None:
    with pytest.raises(InvalidRunConfigException, match=f"Run option `tolerations` is .*{said}"):
        objects(runner, trainer(), tolerations=[taint])


def test_the_retired_mode_is_refused_with_what_to_use_instead(runner: Runner) -> None:
    said = "no run option `mode` any more: each role is an Indexed Job. For Volcano wrap TorchX's scheduler"
    with pytest.raises(InvalidRunConfigException, match=said):
        objects(runner, trainer(), mode="volcano")
    with pytest.raises(InvalidRunConfigException, match=said):
        runner.scheduler_run_opts("monarch_kubernetes").cfg_from_str("mode=auto")


def test_lists_are_read_from_the_command_line(runner: Runner) -> None:
    options = runner.scheduler_run_opts("monarch_kubernetes")
    cfg = options.cfg_from_str("tolerations='pool=a100:NoSchedule;spot:NoExecute',grace=5")
    assert cfg == {"tolerations": ["pool=a100:NoSchedule", "spot:NoExecute"], "grace": 5}
    assert options.cfg_from_str("tolerations=spot:NoExecute,gpu") == {"tolerations": ["spot:NoExecute", "gpu"]}


# -- what pods say


def pod(phase: str = "Pending", runs_host: bool = True, **more: Any) -> dict[str, Any]:
    status = {"phase": phase, "startTime": "2026-11-20T10:00:00Z", **more}
    main: dict[str, Any] = {"name": "main", "resources": {"limits": {"memory": "64M"}}}
    if runs_host:
        main["env"] = [{"name": "MONARCH_TERMINATION_LOG", "value": "/dev/termination-log"}]
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


def test_a_pod_that_others_have_given_our_labels_is_no_replica() -> None:
    ours, copied, numbered, huge = pod(), pod(), pod(), pod()
    for made, role, index in ((ours, "0", "1"), (copied, "", "1"), (numbered, "0", "first"), (huge, "0", "9" * 5000)):
        made["metadata"]["labels"] = {request.LABEL_APP: "app", request.LABEL_ROLE: role}
        made["metadata"]["annotations"] = {"batch.kubernetes.io/job-completion-index": index}
    assert list(snapshot._by_replica([copied, ours, numbered, huge])) == [(0, 1)]


@pytest.mark.parametrize(
    "reported, words",
    [
        (ended(3), "exited with code 3"),
        (ended(137), "was killed by signal 9 (SIGKILL)"),
        (ended(137, "OOMKilled"), "was killed for want of memory (OOMKilled), of which it had 64M (memMB)"),
        (ended(3, message="line\nlast words\n"), "exited with code 3; its last output: last words"),
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
    replicas = role("r", [Attempt(pod("Failed", **reported))]).replicas
    assert replicas[0].failure == f"replica r/0 on node n1 {words}"


@pytest.mark.parametrize(
    ("reported", "is_cause"),
    [
        (ended(143), False),
        (ended(137), False),
        (ended(137, "OOMKilled"), True),
        (ended(143, message=HostResult(1, "rank 3 failed").to_text()), True),
        ({**ended(143), "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "x"}]}, True),
        ({**ended(143), "reason": "Evicted"}, True),
    ],
)
def test_a_pod_that_ended_because_it_was_deleted_is_no_cause(reported: dict[str, Any], is_cause: bool) -> None:
    deleted = pod("Failed", **reported)
    deleted["metadata"]["deletionTimestamp"] = "2026-11-20T10:00:09Z"
    later = pod("Failed", **ended(3))  # Kubernetes tells whole seconds
    first, second = role("r", [Attempt(deleted)], [Attempt(later)], job=FAILED).replicas
    assert first.was_stopped is not is_cause
    assert is_cause or first.distance > second.distance


def test_why_a_pod_waits() -> None:
    waiting = {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}
    stuck = Attempt(pod(containerStatuses=[{"name": "main", "state": {"waiting": waiting}}]))
    assert (stuck.waiting, stuck.stuck_since) == ("ImagePullBackOff: Back-off pulling image", 1795168800.0)
    creating = Attempt(pod(containerStatuses=[{"name": "main", "state": {"waiting": {"reason": "ContainerCreating"}}}]))
    assert (creating.waiting, creating.stuck_since) == ("", 0.0)
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    nowhere = Attempt(pod(conditions=[condition]))
    assert (nowhere.waiting, nowhere.stuck_since) == ("no node can take it (Unschedulable): 0/3 nodes", 0.0)


def test_restarts_of_ranks_are_those_of_all_containers_that_have_ended() -> None:
    now = ended(1, message=HostResult(1, "x" * 5000, rank_restarts=2).to_text(4096))
    now["containerStatuses"][1]["lastState"] = {"terminated": {"exitCode": 137, "message": '{"rank_restarts": 3}'}}
    attempt = Attempt(pod("Failed", **now))
    assert attempt.rank_restarts == 5 and len(attempt.error) <= 4096
    assert json.loads(attempt.error)["message"]["message"].startswith("xxx")
    killed = Attempt(pod("Failed", **ended(137, message='{"rank_restarts": 1}')))
    assert (killed.rank_restarts, killed.error) == (1, "")
    assert killed.failure == "on node n1 was killed by signal 9 (SIGKILL)"
    for message in ("[1]", "7", "last words", '{"rank_restarts": "1"}'):
        assert Attempt(pod("Failed", **ended(1, message=message))).rank_restarts == 0


def test_the_output_of_a_pod_without_a_host_is_no_result() -> None:
    """Kubernetes takes the end of its log for its termination message."""
    forged = HostResult(7, "boom", replica=3, rank_restarts=5, no_retry_reason="x").to_text()
    attempt = Attempt(pod("Failed", runs_host=False, **ended(3, message=f"x\n{forged}\n")))
    assert (attempt.error, attempt.rank_restarts) == ("", 0)
    assert attempt.failure.startswith('on node n1 exited with code 3; its last output: {"message": ')
    attempt = Attempt(pod("Failed", runs_host=False, **ended(3, message="\x1b[2Jx\u202ey")))
    assert attempt.failure == r"on node n1 exited with code 3; its last output: \x1b[2Jx\u202ey"


# -- what follows

NOW = 1000.0
OPEN, GONE, FAILED = JobReport(True), JobReport(False), JobReport(False, State.FAILED)


def role(
    name: str,
    *attempts: list[Attempt],
    job: JobReport = OPEN,
    retries: int = 0,
    fewest: int | None = None,
    sidecar: bool = False,
) -> RoleSnapshot:
    spec = RoleSpec(name, len(attempts), fewest, sidecar, retries)
    replicas = [snapshot.replica(spec, number, pods, job, ".a.n.svc", NOW - 60) for number, pods in enumerate(attempts)]
    return RoleSnapshot(spec, replicas, job.finished, job.reason)


def app(*roles: RoleSnapshot) -> AppSnapshot:
    return AppSnapshot("n:a", "app", roles)


def state_of(*roles: RoleSnapshot) -> AppStatus:
    return reduce(app(*roles))


def run(phase: str = "Running", at: float = 0.0, **more: Any) -> Attempt:
    attempt = Attempt(pod(phase))
    vars(attempt).update(ended=at, failure="exited with code 1", **more)
    return attempt


def test_a_role_has_ended_with_its_pods_though_its_job_has_yet_to_say_so() -> None:
    assert state_of(role("main", [run("Succeeded", 900.0)])).state is State.SUCCEEDED


def test_waits_for_a_replacement() -> None:
    found = state_of(role("main", [run("Failed", 995.0)], [run()], retries=1))
    assert (found.state, found.cause) == (State.RUNNING, None)
    found = state_of(role("main", [run("Failed", 995.0)], retries=1))
    assert found.state is State.PENDING
    for_good = state_of(role("main", [run("Failed", 995.0)], job=JobReport(True, failed=frozenset({0})), retries=1))
    assert for_good.cause is not None
    twice = app(role("main", [run("Failed", 900.0), run(rank_restarts=2)], retries=1))
    assert count_restarts(twice) == 3


def test_a_failed_replica_whose_pod_was_removed_has_failed() -> None:
    """As of a node that was taken out of the cluster."""
    job = JobReport(False, State.FAILED, failed=frozenset({1}))
    well = run("Succeeded", 950.0)
    assert state_of(role("main", [well], [], [well], job=job, fewest=2)).state is State.SUCCEEDED
    assert state_of(role("main", [well], [], job=job)).message == "replica main/1 failed; its pod is gone"
    error = HostResult(1, "boom").to_text()
    found = state_of(role("main", [run("Failed", 990.0, error=error)], [], job=job))
    assert found.cause is not None and (found.cause.id, found.error) == (0, error)


def test_a_pod_that_can_never_start_fails_the_app_after_a_while() -> None:
    def stuck(since: float) -> Attempt:
        return run("Pending", waiting="ErrImagePull: not found", stuck_since=since)

    found = state_of(role("main", [stuck(950.0)], [run()]))
    assert (found.state, found.message) == (State.RUNNING, "replica main/0: ErrImagePull: not found")
    failed = Outcome(State.FAILED, "replica main/0 cannot start: ErrImagePull: not found")
    assert pending_stop(app(role("main", [stuck(930.0)]))) == failed
    queued = JobReport(True, reason="waits for Kueue to admit it to the queue a")
    assert state_of(role("main", [], job=queued)).message == "role main waits for Kueue to admit it to the queue a"


# -- an app's objects


def stored(record: str, ending: str = "", **more: Any) -> AppObjects:
    """The objects of an app; ``record`` is the packed app."""
    options = json.dumps({"grace": 7, "pull_timeout": 60})
    annotations = {request.ANNOTATION_APP: record, request.ANNOTATION_OPTIONS: options}
    if ending:
        annotations[request.ANNOTATION_ENDED] = ending
    metadata = {"name": "a", "creationTimestamp": "2026-11-20T10:00:00Z", "annotations": annotations}
    return AppObjects("n", {"metadata": metadata}, **more)


def labelled(number: int, **more: Any) -> dict[str, Any]:
    made = pod(**more)
    made["metadata"]["name"] = f"p{number}"
    made["metadata"]["annotations"] = {"batch.kubernetes.io/job-completion-index": str(number)}
    made["metadata"]["labels"] = {request.LABEL_ROLE: "0", "torchx.pytorch.org/role-name": "main"}
    return made


def packed(retries: int = 0) -> str:
    submitted = AppDef("My App", [Role("main", "image", num_replicas=2, max_retries=retries)])
    return SubmittedApp(submitted, [RoleSpec("main", 2, max_retries=retries)]).pack()


def test_a_snapshot_of_an_apps_objects() -> None:
    job = {"metadata": {"uid": "u", "labels": {request.LABEL_ROLE: "0"}}, "spec": {}}
    found = snapshot.assemble(stored(packed(), jobs=[job], pods=[labelled(0, phase="Running")]), NOW)
    assert (found.app_id, found.name, found.grace, found.ending, found.native) == ("n:a", "My App", 7.0, None, None)
    assert [replica.state for replica in found.replicas] == [State.RUNNING, State.PENDING]
    assert found.replicas[0].hostname == "app-r-0.a.n.svc"
    refused = snapshot.assemble(stored(packed(), jobs=[job]), NOW, {"u": "gets no pods: quota"})
    assert reduce(refused).message == "role main gets no pods: quota"


@pytest.mark.parametrize("record", ["", "no app", "eJyrrgUAAXUA+Q=="])
def test_a_damaged_annotation_is_named(record: str) -> None:
    with pytest.raises(DamagedFileError, match="the annotation torchx-monarch/appdef of n:a is damaged: "):
        snapshot.assemble(stored(record), NOW)


@pytest.mark.parametrize(
    "name, text",
    [
        (request.ANNOTATION_OPTIONS, "{"),
        (request.ANNOTATION_OPTIONS, '{"grace": "long", "pull_timeout": 60}'),
        (request.ANNOTATION_ENDED, '{"state": "GONE"}'),
        (request.ANNOTATION_ENDED, "[" * 100_000),
    ],
)
def test_another_damaged_annotation_costs_no_other_app(name: str, text: str, caplog: pytest.LogCaptureFixture) -> None:
    objects = stored(packed())
    objects.record["metadata"]["annotations"][name] = text
    assert read_undamaged([objects], lambda found: snapshot.assemble(found, NOW)) == []
    assert f"the annotation {name} of n:a is damaged: " in caplog.text


def test_a_line_without_end_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    short = [b"2026-11-20T10:00:00Z %d\n" % number for number in range(3)]
    body = b"".join(short) + b"2026-11-20T10:00:00Z " + b"x" * 3 * MAX_LINE_BYTES + b"\n2026-11-20T10:00:01Z last"
    answer = urllib3.HTTPResponse(io.BytesIO(body), preload_content=False)
    monkeypatch.setattr(Api, "_send", lambda *args, **more: answer)
    lines = list(Api.lines(Api.__new__(Api), "/log"))
    assert max(map(len, lines)) < 2 * MAX_LINE_BYTES
    assert lines[:3] == short and lines[-1] == b"2026-11-20T10:00:01Z last"
    assert b"".join(lines).count(b"x") == 3 * MAX_LINE_BYTES
