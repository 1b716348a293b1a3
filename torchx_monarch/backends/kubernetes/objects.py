# SPDX-License-Identifier: BSD-3-Clause
"""Create the objects of an app, or none of them; read them; end an app, in mode ``job`` with its logs kept; remove it.

Kubernetes ends pods by deleting them together with their logs; deleting or suspending a Job does the same. So the Jobs
are deleted with their pods orphaned, and each pod gets an ``activeDeadlineSeconds`` that has already passed. The
kubelet then ends the pod with SIGTERM and its grace period, and the pod stays, with its log, until the app is deleted.
"""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict

from torchx_monarch.backends.core.snapshot import Outcome
from torchx_monarch.backends.kubernetes import request
from torchx_monarch.backends.kubernetes.native import Api, KubernetesError
from torchx_monarch.backends.kubernetes.request import (
    LABEL_APP,
    VOLCANO,
    KubernetesRequest,
    Object,
    collection,
    owner,
    path_of,
)
from torchx_monarch.backends.kubernetes.snapshot import DEADLINE, AppObjects, Attempt, KubernetesSnapshot

_log = logging.getLogger("torchx_monarch")


def submit(api: Api, app: KubernetesRequest, credentials: str) -> None:
    """Create all objects of a request, of which the jobs own the others; remove them if one cannot be created."""
    objects: list[Object] = []
    jobs: list[Object] = []
    try:
        for resource in request.with_credentials(app.objects, credentials):
            if jobs and resource["kind"] != "Job":
                resource = {**resource, "metadata": {**resource["metadata"], "ownerReferences": jobs}}
            objects.append(resource)
            try:
                stored = create(api, resource, app.namespace)
            except KubernetesError as error:
                if 400 <= error.status < 500:
                    objects.pop()  # it was not created, and an object of that name may belong to another app
                raise
            if resource["kind"] == "Job":
                jobs.append(owner(stored))
        # The record, created first, comes last: by it an app is found whose Secret has no owner yet.
        for resource in reversed(objects):
            if resource["kind"] != "Job" and "ownerReferences" not in resource["metadata"]:
                api.patch(path_of(resource, app.namespace), {"metadata": {"ownerReferences": jobs}})
    except BaseException:
        for resource in reversed(objects):
            try:
                api.delete(path_of(resource, app.namespace))
            except KubernetesError as error:
                name = f"{resource['kind'].lower()} {resource['metadata']['name']} --namespace {app.namespace}"
                _log.warning("not removed, to be done by `kubectl delete %s`: %s", name, error)
        raise


def create(api: Api, resource: Object, namespace: str, dry_run: bool = False) -> Object:
    """Create an object, or have it checked alone."""
    return api.create(collection(resource["apiVersion"], resource["kind"], namespace), resource, dry_run)


def find(api: Api, namespace: str, name: str) -> AppObjects | None:
    """Return the objects of an app; None if this scheduler has no app of this id."""
    places = {"job": collection("v1", "Service", namespace), "volcano": collection(VOLCANO, "Job", namespace)}
    for mode, record_path in places.items():
        record = api.find(f"{record_path}/{name}")
        if record is not None and _is_record(record):
            selector = f"{LABEL_APP}={name}"
            jobs = api.items(collection("batch/v1", "Job", namespace), selector) if mode == "job" else []
            return AppObjects(mode, namespace, record, jobs, api.items(collection("v1", "Pod", namespace), selector))
    return None


def find_all(api: Api, namespace: str) -> list[AppObjects]:
    """Return the objects of all apps of this scheduler in a namespace."""

    def by_app(path: str) -> dict[str, list[Object]]:
        found = defaultdict[str, list[Object]](list)
        for resource in api.items(path, LABEL_APP):
            found[resource["metadata"]["labels"][LABEL_APP]].append(resource)
        return found

    jobs, pods = by_app(collection("batch/v1", "Job", namespace)), by_app(collection("v1", "Pod", namespace))
    records = [("job", service) for service in api.items(collection("v1", "Service", namespace), LABEL_APP)]
    if has_volcano(api):
        records += [("volcano", job) for job in api.items(collection(VOLCANO, "Job", namespace), LABEL_APP)]
    apps = []
    for mode, record in records:
        if _is_record(record):
            name = record["metadata"]["name"]
            apps.append(AppObjects(mode, namespace, record, jobs[name], pods[name]))
    return apps


def _is_record(resource: Object) -> bool:
    return request.ANNOTATION_APP in (resource["metadata"].get("annotations") or {})


def has_volcano(api: Api) -> bool:
    """Whether Volcano is installed in the cluster."""
    return api.find(f"/apis/{VOLCANO}") is not None


def refusals(api: Api, app: AppObjects) -> dict[str, str]:
    """Return why open Jobs without pods cannot get any, by the Jobs' uids. Only FailedCreate events tell the reason."""
    with_pods = {owner["uid"] for pod in app.pods for owner in pod["metadata"].get("ownerReferences") or ()}
    found = {}
    for job in app.jobs:
        uid, conditions = job["metadata"]["uid"], (job.get("status") or {}).get("conditions") or ()
        has_ended = any(condition.get("status") == "True" for condition in conditions)
        if uid in with_pods or has_ended or job["spec"].get("suspend"):
            continue
        selector = f"involvedObject.uid={uid},reason=FailedCreate"
        try:
            events = api.get(collection("v1", "Event", app.namespace), fieldSelector=selector)["items"]
        except KubernetesError as error:
            if error.status != 403:  # a user may have access to Jobs and not to events
                raise
            return {}
        if events:
            last = max(events, key=lambda event: event.get("lastTimestamp") or event["metadata"]["creationTimestamp"])
            found[uid] = f"gets no pods: {str(last.get('message', '')).removeprefix('Error creating: ')}"
    return found


def stop(api: Api, app: KubernetesSnapshot, outcome: Outcome) -> None:
    """Start to end the pods of an app, and write into its record how it ends; the first outcome counts."""
    ending = app.ending or outcome
    note = json.dumps({"state": ending.state.name, "msg": ending.message, "time": ending.time or time.time()})
    metadata: Object = {"annotations": {request.ANNOTATION_ENDED: note}}
    objects, record = app.objects, path_of(app.objects.record, app.objects.namespace)
    if objects.mode == "volcano":
        api.patch(record, {"metadata": metadata})
        _abort(api, record)
        return
    jobs = app.open_jobs
    # The record must no longer be owned by Jobs that are deleted below: Kubernetes would delete it with its last owner.
    metadata["ownerReferences"] = [owner(job) for job in objects.jobs if job not in jobs] or None
    api.patch(record, {"metadata": metadata})
    for job in jobs:
        api.delete(path_of(job, objects.namespace), "Orphan")
    path = collection("v1", "Pod", objects.namespace)
    for pod in api.items(path, f"{LABEL_APP}={objects.name}"):
        attempt = Attempt(pod)
        if attempt.is_running and not attempt.is_stopping:
            if attempt.phase == "Pending":  # it has no log
                api.delete(f"{path}/{attempt.name}")
            else:
                api.patch(f"{path}/{attempt.name}", {"spec": {"activeDeadlineSeconds": DEADLINE}})


def _abort(api: Api, path: str) -> None:
    """End a Volcano job as TorchX does, by setting its phase to Aborted."""
    while (job := api.find(path)) is not None:
        job.setdefault("status", {}).setdefault("state", {})["phase"] = "Aborted"
        try:
            api.replace_status(path, job)
            return
        except KubernetesError as error:
            if error.status != 409:  # Volcano changed the job in between; TorchX gives up here
                raise


def remove(api: Api, app: KubernetesSnapshot) -> None:
    """Delete all objects of an app; running pods get their grace period."""
    namespace, name = app.objects.namespace, app.objects.name
    owners = [app.objects.record] if app.objects.mode == "volcano" else app.objects.jobs
    for job in owners:
        api.delete(path_of(job, namespace))
    api.delete(collection("v1", "Pod", namespace), labelSelector=f"{LABEL_APP}={name}")
    api.delete(f"{collection('v1', 'Secret', namespace)}/{name}")
    if app.objects.mode == "job":  # the record last: while it exists, the app is listed and the call can be repeated
        api.delete(path_of(app.objects.record, namespace))
