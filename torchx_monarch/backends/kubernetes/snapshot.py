# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Read the records, Jobs and pods of a namespace from the API server and assemble them into apps."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torchx.schedulers.kubernetes_scheduler import JOB_STATE, LABEL_REPLICA_ID
from torchx.specs import AppDef, AppState, Role

from torchx_monarch.backends import appdef_codec, validation
from torchx_monarch.backends.kubernetes import names, status
from torchx_monarch.backends.kubernetes.api import Api, KubernetesError
from torchx_monarch.backends.kubernetes.request import VOLCANO, Object, collection
from torchx_monarch.backends.kubernetes.status import (
    Attempt,
    Ended,
    KubernetesRole,
    KubernetesStatus,
    Rules,
    WorkStatus,
)
from torchx_monarch.backends.outcome import RolePolicy

_INDEX = "batch.kubernetes.io/job-completion-index"

_VOLCANO_ENDED = {AppState.SUCCEEDED, AppState.FAILED, AppState.CANCELLED}


@dataclass(frozen=True)
class KubernetesSnapshot:
    """The state of an app at one time.

    Attributes:
        mode: ``job`` or ``volcano``.
        namespace, name: the two parts of its id.
        record: the object that carries its annotations: the Service, or the Volcano job.
        jobs: its existing Jobs in mode ``job``; empty in mode ``volcano``.
        app: the app as submitted.
        roles: the state of each role.
        overall: the state of the app.
    """

    mode: str
    namespace: str
    name: str
    record: Object
    jobs: list[Object]
    app: AppDef
    roles: list[KubernetesRole]
    overall: KubernetesStatus

    @property
    def app_id(self) -> str:
        return f"{self.namespace}:{self.name}"

    @property
    def restarts(self) -> int:
        """The number of restarts of replicas, and of ranks within them, as far as their pods still exist."""
        counts = {role.name: [max(0, len(one.attempts) - 1) for one in role.replicas] or [0] for role in self.roles}
        pods = [one for role in self.roles for each in role.replicas for one in each.attempts]
        return validation.restarts(self.app, counts) + sum(one.rank_restarts for one in pods)


def find(api: Api, namespace: str, name: str) -> KubernetesSnapshot | None:
    """Return the snapshot of an app; None if this scheduler has no app of this id.

    Raises:
        KubernetesError: the cluster is unreachable or refuses.
    """
    selector = f"{names.LABEL_APP}={name}"
    record = api.find(f"{collection('v1', 'Service', namespace)}/{name}")
    mode, jobs = "job", []
    if record is not None and names.ANNOTATION_APP in (record["metadata"].get("annotations") or {}):
        jobs = api.items(collection("batch/v1", "Job", namespace), selector)
    else:
        mode, record = "volcano", api.find(f"{collection(VOLCANO, 'Job', namespace)}/{name}")
        if record is None or names.ANNOTATION_APP not in (record["metadata"].get("annotations") or {}):
            return None
    pods = api.items(collection("v1", "Pod", namespace), selector)
    return _assemble(mode, namespace, record, jobs, pods, _refusals(api, namespace, jobs, pods))


def _refusals(api: Api, namespace: str, jobs: Sequence[Object], pods: Sequence[Object]) -> dict[str, str]:
    """Return why the Job controller cannot create pods, by the uid of each unfinished Job that has none.

    Only the Jobs' FailedCreate events contain the reason. Empty if the user may not read events.
    """
    have = {owner["uid"] for pod in pods for owner in pod["metadata"].get("ownerReferences") or ()}
    found = {}
    for job in jobs:
        uid, work = job["metadata"]["uid"], status.work_of_job(job)
        if uid in have or work.finished is not None or work.word:
            continue
        wanted = f"involvedObject.uid={uid},reason=FailedCreate"
        try:
            events = api.get(collection("v1", "Event", namespace), fieldSelector=wanted)["items"]
        except KubernetesError as error:
            if error.status != 403:  # a user may have access to Jobs and not to events
                raise
            return {}
        if events:
            last = max(events, key=lambda one: str(one.get("lastTimestamp") or one["metadata"]["creationTimestamp"]))
            found[uid] = f"gets no pods: {str(last.get('message', '')).removeprefix('Error creating: ')}"
    return found


def find_all(api: Api, namespace: str) -> list[KubernetesSnapshot]:
    """Return the snapshots of all apps of this scheduler in a namespace, the newest first.

    Raises:
        KubernetesError: the cluster is unreachable or refuses.
    """
    ours = names.LABEL_APP
    jobs = _by_app(api.items(collection("batch/v1", "Job", namespace), ours))
    pods = _by_app(api.items(collection("v1", "Pod", namespace), ours))
    found = []
    for mode, records in (
        ("job", api.items(collection("v1", "Service", namespace), ours)),
        ("volcano", api.items(collection(VOLCANO, "Job", namespace), ours) if has_volcano(api) else []),
    ):
        for record in records:
            if names.ANNOTATION_APP in (record["metadata"].get("annotations") or {}):
                name = record["metadata"]["name"]
                theirs = jobs.get(name, []) if mode == "job" else []
                found.append(_assemble(mode, namespace, record, theirs, pods.get(name, [])))
    return sorted(found, key=lambda one: one.record["metadata"]["creationTimestamp"], reverse=True)


def has_volcano(api: Api) -> bool:
    """Whether Volcano is installed in the cluster.

    Raises:
        KubernetesError: the cluster is unreachable or refuses.
    """
    return api.find(f"/apis/{VOLCANO}") is not None


def noted(record: Object) -> Ended | None:
    """Return how this scheduler has ended an app, from the app's record; None if it has not."""
    note = _json(record["metadata"]["annotations"].get(names.ANNOTATION_ENDED))
    return Ended(AppState[note["state"]], note.get("msg", "")) if note else None


def _by_app(objects: Iterable[Object]) -> dict[str, list[Object]]:
    found: dict[str, list[Object]] = {}
    for one in objects:
        found.setdefault(one["metadata"]["labels"][names.LABEL_APP], []).append(one)
    return found


def _assemble(
    mode: str,
    namespace: str,
    record: Object,
    jobs: list[Object],
    pods: Sequence[Object],
    refusals: Mapping[str, str] = MappingProxyType({}),
) -> KubernetesSnapshot:
    annotations = record["metadata"]["annotations"]
    name = record["metadata"]["name"]
    app = appdef_codec.unpack(annotations[names.ANNOTATION_APP]) or AppDef(name, [Role("unknown", image="")])
    by_role = {job["metadata"]["labels"].get(names.LABEL_ROLE): job for job in jobs}
    roles = []
    for index, role in enumerate(app.roles):
        job = by_role.get(str(index))
        work = _work_of_volcano(record) if mode == "volcano" else status.work_of_job(job)
        if job is not None and (word := refusals.get(job["metadata"]["uid"])):
            work = replace(work, word=word)
        attempts = _attempts(pods, index, role.num_replicas)
        replicas = [
            status.replica(role.name, number, each, work, role.max_retries) for number, each in enumerate(attempts)
        ]
        roles.append(KubernetesRole(role.name, replicas, work, RolePolicy.of(role)))
    options = _json(annotations.get(names.ANNOTATION_OPTIONS))
    grace, patience = float(options.get("grace", 0)), float(options.get("pull_timeout", 300))
    rules = Rules(time.time(), grace, patience, noted(record))
    overall = _volcano_status(record, roles, rules) if mode == "volcano" else status.evaluate(roles, rules)
    return KubernetesSnapshot(mode, namespace, name, record, jobs, app, roles, overall)


def _attempts(pods: Sequence[Object], role: int, replicas: int) -> list[list[Attempt]]:
    """Return the pods of each replica of a role, the oldest first."""
    found: list[list[Attempt]] = [[] for _ in range(replicas)]
    for pod in pods:
        metadata = pod["metadata"]
        labels, annotations = metadata["labels"], metadata.get("annotations") or {}
        number = str(annotations.get(_INDEX) or labels.get(LABEL_REPLICA_ID) or "")
        if labels.get(names.LABEL_ROLE) == str(role) and number.isdigit() and int(number) < replicas:
            found[int(number)].append(status.attempt(pod))
    for each in found:
        each.sort(key=lambda one: (one.created, one.lives))
    return found


def _work_of_volcano(job: Object) -> WorkStatus:
    state = _state_of_volcano(job)
    finished = state if state in _VOLCANO_ENDED else None
    return WorkStatus(finished is None, AppState.FAILED if finished is AppState.CANCELLED else finished)


def _state_of_volcano(job: Object) -> AppState:
    phase = ((job.get("status") or {}).get("state") or {}).get("phase", "")
    # TorchX reports a job without a phase as UNKNOWN (torchx#999). One value of JOB_STATE is of a different enum.
    return AppState[JOB_STATE[phase].name] if phase in JOB_STATE else AppState.PENDING


def _volcano_status(job: Object, roles: Sequence[KubernetesRole], rules: Rules) -> KubernetesStatus:
    """Return the status of a Volcano app: its state from the job's phase, its message and cause from the pods."""
    state = _state_of_volcano(job)
    told = status.evaluate(roles, rules)
    msg = told.msg
    if not job.get("status"):
        queue = job["spec"].get("queue")
        msg = f"Volcano has not looked at the job yet: does it run here, and is there a queue {queue}?"
    elif not msg and state in (AppState.FAILED, AppState.PENDING):
        msg = str((job["status"].get("state") or {}).get("message", ""))
    if state is AppState.CANCELLED and rules.ended is not None:
        return KubernetesStatus(rules.ended.state, rules.ended.msg, told.cause)  # aborted by cancel.abort()
    if state is AppState.SUCCEEDED or state is AppState.CANCELLED:
        return KubernetesStatus(state)
    pending_decision = told.pending_decision if state not in _VOLCANO_ENDED else None
    return KubernetesStatus(state, msg, told.cause, pending_decision)


def _json(text: str | None) -> dict[str, Any]:
    try:
        read = json.loads(text or "{}")
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}
