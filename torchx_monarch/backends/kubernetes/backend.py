# SPDX-License-Identifier: BSD-3-Clause
"""Run apps on a Kubernetes cluster, with TorchX's pods and workspaces.

The API server holds the whole state of an app, so any process on any machine can query and cancel it. Kubernetes ends
pods by deleting them together with their logs. So ``stop`` deletes the Jobs with their pods orphaned, and the kubelet
ends each pod by an ``activeDeadlineSeconds`` that has passed; the pod stays until the app is deleted.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from datetime import datetime, timezone

from torchx.specs import AppDef
from torchx.workspace.docker_workspace import DockerWorkspaceMixin

from torchx_monarch.backends.core.backend import Backend, Capabilities, Cfg, CheckResult, LogQuery, read_undamaged
from torchx_monarch.backends.core.snapshot import Outcome, TimedLines, nanoseconds
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.kubernetes import request, snapshot
from torchx_monarch.backends.kubernetes.connection import Api, KubernetesError
from torchx_monarch.backends.kubernetes.request import (
    LABEL_APP,
    KubernetesOpts,
    KubernetesRequest,
    Object,
    collection,
    path_of,
    render_app,
)
from torchx_monarch.backends.kubernetes.snapshot import DEADLINE, AppObjects, Attempt, KubernetesSnapshot
from torchx_monarch.model.state import State

_LOG_POLL = 0.5
"""Seconds between two polls of a followed replica that has no running pod."""

_log = logging.getLogger("torchx_monarch")


class KubernetesBackend(Backend[KubernetesOpts, KubernetesRequest, KubernetesSnapshot]):
    """Runs each replica as a pod of the cluster that the kubeconfig names."""

    options = KubernetesOpts
    retired_options = {
        "mode": "each role is an Indexed Job. For Volcano wrap TorchX's scheduler `kubernetes`: write the section "
        "[monarch_wrap] with the line `monarch_volcano = kubernetes` into .torchxconfig, and use -s monarch_volcano"
    }
    capabilities = Capabilities(
        limits_resources=True,
        kills=False,
        separate_streams=False,
        needs_owner=True,
        needs_image=True,
    )

    def __init__(self) -> None:
        self.workspace = DockerWorkspaceMixin()

    @functools.cached_property
    def _api(self) -> Api:
        return Api.from_environment()

    def close(self) -> None:
        if api := self.__dict__.pop("_api", None):
            api.close()

    # -- submitting ----------------------------------------------------------------------------------------------------

    def checks(self, options: KubernetesOpts) -> Iterable[CheckResult]:
        version = self._api.get("/version").get("gitVersion")
        return [CheckResult("Kubernetes", f"{version} at {self._api.host}")]

    def check_options(self, cfg: KubernetesOpts) -> None:
        """Check the options and, for those that need a cluster, the cluster's configuration."""
        request.check_options(cfg)
        if cfg.validate_spec:
            _ = self._api

    def render(self, app: AppDef, submitted: SubmittedApp, options: KubernetesOpts) -> KubernetesRequest:
        """Return the objects; have the cluster validate them (``validate_spec``)."""
        record = {
            request.ANNOTATION_APP: submitted.pack(),
            request.ANNOTATION_OPTIONS: json.dumps(asdict(request.StoredOptions(options.grace, options.pull_timeout))),
        }
        namespace = options.namespace
        if namespace is None:
            try:
                namespace = self._api.namespace
            except KubernetesError:  # a dry run without validate_spec needs no cluster
                namespace = "default"
        rendered = render_app(app, submitted.roles, options, namespace, record)
        for resource in rendered.objects if options.validate_spec else ():
            self._create(resource, namespace, dry_run=True)
        return rendered

    def submit(self, app: KubernetesRequest, submitted: SubmittedApp, credentials: str) -> str:
        """Create all objects of a request, of which the jobs own the others; remove them if one cannot be created."""
        objects: list[Object] = []
        jobs: list[Object] = []
        try:
            for resource in request.with_credentials(app.objects, credentials):
                objects.append(resource)
                try:
                    stored = self._create(resource, app.namespace)
                except KubernetesError as error:
                    if 400 <= error.status < 500:
                        objects.pop()  # it was not created, and an object of that name may belong to another app
                    raise
                if resource["kind"] == "Job":
                    jobs.append(request.owner(stored))
            # The record, created first, comes last: by it an app is found whose Secret has no owner yet.
            for resource in reversed(objects):
                if resource["kind"] != "Job":
                    self._api.patch(path_of(resource, app.namespace), {"metadata": {"ownerReferences": jobs}})
        except BaseException:
            for resource in reversed(objects):
                try:
                    self._api.delete(path_of(resource, app.namespace))
                except KubernetesError as error:
                    name = f"{resource['kind'].lower()} {resource['metadata']['name']} --namespace {app.namespace}"
                    _log.warning("not removed, to be done by `kubectl delete %s`: %s", name, error)
            raise
        return f"{app.namespace}:{app.app_id}"

    def _create(self, resource: Object, namespace: str, dry_run: bool = False) -> Object:
        path = collection(resource["apiVersion"], resource["kind"], namespace)
        return self._api.create(path, resource, dry_run)

    # -- reading -------------------------------------------------------------------------------------------------------

    def snapshot(self, app_id: str, *, brief: bool = False) -> KubernetesSnapshot | None:
        place = request.split(app_id)
        found = self._find(*place) if place else None
        if found is None:
            return None
        refusals = {} if brief else self._refusals(found)
        return snapshot.assemble(found, self._api.server_time, refusals)

    def snapshots(self, options: Cfg) -> list[KubernetesSnapshot]:
        """Read the apps of one namespace: that of the kubeconfig, unless the option names one.

        TorchX lists all jobs of all users.
        """
        found = self._find_all(str(options.get("namespace") or self._api.namespace))
        return read_undamaged(found, lambda objects: snapshot.assemble(objects, self._api.server_time))

    def read_log(
        self, app: KubernetesSnapshot, role: str, replica: int, query: LogQuery[KubernetesSnapshot]
    ) -> Iterator[TimedLines]:
        """Yield the lines. What does not exist or has not started has an empty log.

        TorchX passes the server a number of seconds for ``since``, which is wrong for a time with a zone, refuses
        ``until``, and stops following when the pod ends.
        """
        since = int(query.since.timestamp() * 10**6) * 1000 if query.since else 0
        until = int(query.until.timestamp() * 10**6) * 1000 if query.until else None
        path = collection("v1", "Pod", app.objects.namespace)
        read: dict[str, int] = {}
        ended: set[str] = set()
        for is_last in query.reads(_LOG_POLL):
            latest = query.latest() if query.follow else None
            for attempt in (latest or app).attempts[role, replica]:
                if attempt.name in ended:
                    continue
                options = {"timestamps": "true", "container": attempt.container}
                if not is_last and attempt.is_running:
                    options["follow"] = "true"
                if query.tail and attempt.name not in read:
                    options["tailLines"] = str(query.tail)
                start = max(since, read.get(attempt.name, -1) + 1)
                for stamp, text in self._lines_of_pod(f"{path}/{attempt.name}/log", start, options):
                    if until is not None and stamp > until:
                        return
                    read[attempt.name] = stamp
                    yield TimedLines(stamp / 1e9, text)
                if not attempt.is_running:
                    ended.add(attempt.name)

    def _lines_of_pod(self, path: str, start: int, options: dict[str, str]) -> Iterator[tuple[int, str]]:
        if start:  # the server accepts whole seconds only
            options["sinceTime"] = datetime.fromtimestamp(start // 10**9, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        stamp = 0
        try:
            for line in self._api.lines(path, **options):
                text = line.decode(errors="replace")
                word, _, rest = text.partition(" ")
                if moment := nanoseconds(word):  # else the continuation of a very long line, which has no timestamp
                    stamp, text = moment, rest
                if stamp >= start:
                    yield stamp, text
        except KubernetesError as error:
            # 404: the pod no longer exists. 400: its container has not started.
            if error.status not in (400, 404):
                raise

    def _find(self, namespace: str, name: str) -> AppObjects | None:
        """Return the objects of an app; None if this scheduler has no app of this id."""
        record = self._api.find(f"{collection('v1', 'Service', namespace)}/{name}")
        if record is None or not _is_record(record):
            return None
        selector = f"{LABEL_APP}={name}"
        jobs = self._api.items(collection("batch/v1", "Job", namespace), selector)
        pods = self._api.items(collection("v1", "Pod", namespace), selector)
        return AppObjects(namespace, record, jobs, pods)

    def _find_all(self, namespace: str) -> list[AppObjects]:
        """Return the objects of all apps of this scheduler in a namespace."""

        def by_app(path: str) -> dict[str, list[Object]]:
            found = defaultdict[str, list[Object]](list)
            for resource in self._api.items(path, LABEL_APP):
                found[resource["metadata"]["labels"][LABEL_APP]].append(resource)
            return found

        jobs, pods = by_app(collection("batch/v1", "Job", namespace)), by_app(collection("v1", "Pod", namespace))
        apps = []
        for record in self._api.items(collection("v1", "Service", namespace), LABEL_APP):
            if _is_record(record):
                name = record["metadata"]["name"]
                apps.append(AppObjects(namespace, record, jobs[name], pods[name]))
        return apps

    def _refusals(self, app: AppObjects) -> dict[str, str]:
        """Return why open Jobs without pods cannot get any, by the Jobs' uids. Only FailedCreate events tell it."""
        with_pods = {owner["uid"] for pod in app.pods for owner in pod["metadata"].get("ownerReferences") or ()}
        found = {}
        for job in app.jobs:
            uid, conditions = job["metadata"]["uid"], (job.get("status") or {}).get("conditions") or ()
            has_ended = any(condition.get("status") == "True" for condition in conditions)
            if uid in with_pods or has_ended or job["spec"].get("suspend"):
                continue
            selector = f"involvedObject.uid={uid},reason=FailedCreate"
            try:
                events = self._api.get(collection("v1", "Event", app.namespace), fieldSelector=selector)["items"]
            except KubernetesError as error:
                if error.status != 403:  # a user may have access to Jobs and not to events
                    raise
                return {}
            if events:
                last = max(events, key=lambda e: e.get("lastTimestamp") or e["metadata"]["creationTimestamp"])
                found[uid] = f"gets no pods: {str(last.get('message', '')).removeprefix('Error creating: ')}"
        return found

    # -- ending --------------------------------------------------------------------------------------------------------

    def stop(self, app: KubernetesSnapshot, outcome: Outcome, grace: float | None) -> None:
        """Start to end the pods, with their own grace period, and write why into the record: the first counts."""
        ending = app.ending or outcome
        note = json.dumps(asdict(replace(ending, time=ending.time or time.time())))
        metadata: Object = {"annotations": {request.ANNOTATION_ENDED: note}}
        objects, record = app.objects, path_of(app.objects.record, app.objects.namespace)
        # The others have ended, and only their status may lag: it says how.
        unfinished = {
            str(index)
            for index, role in enumerate(app.roles)
            if role.finished is None and any(r.state not in (State.SUCCEEDED, State.FAILED) for r in role.replicas)
        }
        jobs = [job for job in objects.jobs if job["metadata"]["labels"].get(request.LABEL_ROLE) in unfinished]
        # Kubernetes would delete the record with the last of its owners, which are deleted below.
        metadata["ownerReferences"] = [request.owner(job) for job in objects.jobs if job not in jobs] or None
        self._api.patch(record, {"metadata": metadata})
        for job in jobs:
            self._api.delete(path_of(job, objects.namespace), "Orphan")
        path = collection("v1", "Pod", objects.namespace)
        for pod in self._api.items(path, f"{LABEL_APP}={objects.name}"):
            attempt = Attempt(pod)
            if attempt.is_running and not attempt.is_stopping:
                if attempt.phase == "Pending":  # it has no log
                    self._api.delete(f"{path}/{attempt.name}")
                else:
                    self._api.patch(f"{path}/{attempt.name}", {"spec": {"activeDeadlineSeconds": DEADLINE}})

    def remove(self, app: KubernetesSnapshot) -> None:
        """Delete all objects of an app; running pods get their grace period."""
        namespace, name = app.objects.namespace, app.objects.name
        for job in app.objects.jobs:
            self._api.delete(path_of(job, namespace))
        self._api.delete(collection("v1", "Pod", namespace), labelSelector=f"{LABEL_APP}={name}")
        self._api.delete(f"{collection('v1', 'Secret', namespace)}/{name}")
        # Last: while the record exists, the app is listed and can be deleted again.
        self._api.delete(path_of(app.objects.record, namespace))


def _is_record(resource: Object) -> bool:
    return request.ANNOTATION_APP in (resource["metadata"].get("annotations") or {})
