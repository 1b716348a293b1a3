# SPDX-License-Identifier: BSD-3-Clause
"""Create the objects of an app, or none of them; end an app, in mode ``job`` with its logs kept; remove it.

Kubernetes ends pods by deleting them together with their logs; deleting or suspending a Job does the same. So the Jobs
are deleted with their pods orphaned, and each pod gets an ``activeDeadlineSeconds`` that has already passed. The
kubelet then ends the pod with SIGTERM and its grace period, and the pod stays, with its log, until the app is deleted.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence

from torchx_monarch.backends.core.snapshot import Outcome
from torchx_monarch.backends.kubernetes import names
from torchx_monarch.backends.kubernetes.native import Api, KubernetesError
from torchx_monarch.backends.kubernetes.request import (
    KubernetesRequest,
    Object,
    collection,
    collection_of,
    owner,
    path_of,
    with_credentials,
)
from torchx_monarch.backends.kubernetes.snapshot import DEADLINE, Attempt, KubernetesSnapshot

_NEEDED = ("completionMode", "backoffLimitPerIndex")
"""Fields of a Job that a server older than 1.29 silently drops."""

_IN_FLIGHT = 0.5
"""Seconds after which an interrupted request has taken effect, if it takes effect at all."""

_log = logging.getLogger("torchx_monarch")


def validate(api: Api, request: KubernetesRequest) -> None:
    """Have the API server validate the objects of a request without storing them.

    Raises:
        KubernetesError: the cluster would refuse an object.
    """
    for resource in request.objects:
        _check_kept(resource, api.create(collection_of(resource, request.namespace), resource, dry_run=True))


def submit(api: Api, request: KubernetesRequest, credentials: str) -> None:
    """Create all objects of a request.

    Objects that are created after the jobs belong to them from the start; those created before are given to them last.

    Raises:
        KubernetesError: an object could not be created; those created before are removed.
    """
    made: list[Object] = []
    doubtful: list[Object] = []
    try:
        for resource in with_credentials(request.objects, credentials):
            jobs = [owner(job) for job in made if job["kind"] == "Job"]
            if jobs and resource["kind"] != "Job":
                resource = {**resource, "metadata": {**resource["metadata"], "ownerReferences": jobs}}
            doubtful = [resource]
            made.append(api.create(collection_of(resource, request.namespace), resource))
            doubtful.clear()
            _check_kept(resource, made[-1])
        owners = [owner(job) for job in made if job["kind"] == "Job"]
        # The record, made first, comes last: by it an app is found whose Secret has no owner yet.
        for resource in reversed(made):
            if resource["kind"] != "Job" and not resource["metadata"].get("ownerReferences"):
                api.patch(path_of(resource, request.namespace), {"metadata": {"ownerReferences": owners}})
    except BaseException as error:
        # With a 4xx status the object was not created, and an object of that name may belong to another app.
        if isinstance(error, KubernetesError) and 400 <= error.status < 500:
            doubtful.clear()
        _remove(api, [*doubtful, *reversed(made)], request.namespace)
        if doubtful:
            time.sleep(_IN_FLIGHT)
            _remove(api, doubtful, request.namespace)
        raise


def _remove(api: Api, objects: Sequence[Object], namespace: str) -> None:
    """Delete the objects of a failed submission; log a warning for each object that cannot be deleted."""
    for resource in objects:
        try:
            api.delete(path_of(resource, namespace))
        except KubernetesError as error:
            what = f"{resource['kind'].lower()} {resource['metadata']['name']} --namespace {namespace}"
            _log.warning("not removed, to be done by `kubectl delete %s`: %s", what, error)


def _check_kept(sent: Object, stored: Object) -> None:
    """Check that the server has kept the fields of a Job that this package needs.

    Raises:
        KubernetesError: the server has dropped a field.
    """
    dropped = [key for key in _NEEDED if key in sent.get("spec", {}) and key not in stored.get("spec", {})]
    if dropped:
        raise KubernetesError(
            f"the cluster does not know {' and '.join(dropped)} of a Job: mode=job needs Kubernetes 1.29 or later"
        )


def stop(api: Api, app: KubernetesSnapshot, outcome: Outcome) -> None:
    """Start to end the pods of an app; return without waiting for them.

    Args:
        outcome: how it ends, which is noted in its record. An earlier note takes precedence: two processes may describe
            or cancel the app concurrently.

    Raises:
        KubernetesError: the record, a Job or a pod cannot be changed. The call can be repeated.
    """
    ending = app.ending or outcome
    note = json.dumps({"state": ending.state.name, "msg": ending.message, "time": ending.time or time.time()})
    metadata: Object = {"annotations": {names.ANNOTATION_ENDED: note}}
    record = path_of(app.objects.record, app.objects.namespace)
    if app.objects.mode == "volcano":
        api.patch(record, {"metadata": metadata})
        _abort(api, record)
        return
    jobs = app.open_jobs
    # The record must no longer be owned by Jobs that are deleted below: Kubernetes would delete it with its last owner.
    metadata["ownerReferences"] = [owner(job) for job in app.objects.jobs if job not in jobs] or None
    api.patch(record, {"metadata": metadata})
    for job in jobs:
        api.delete(path_of(job, app.objects.namespace), "Orphan")
    _stop_pods(api, app.objects.namespace, app.objects.name)


def remove(api: Api, app: KubernetesSnapshot) -> None:
    """Delete all objects of an app; running pods get their grace period.

    Raises:
        KubernetesError: an object cannot be deleted. The call can be repeated.
    """
    namespace, name = app.objects.namespace, app.objects.name
    for job in app.objects.jobs:
        api.delete(path_of(job, namespace))
    if app.objects.mode == "volcano":
        api.delete(path_of(app.objects.record, namespace))
    api.delete(collection("v1", "Pod", namespace), labelSelector=f"{names.LABEL_APP}={name}")
    api.delete(f"{collection('v1', 'Secret', namespace)}/{name}")
    if app.objects.mode == "job":  # the record last: while it exists, the app is listed and the call can be repeated
        api.delete(path_of(app.objects.record, namespace))


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


def _stop_pods(api: Api, namespace: str, name: str) -> None:
    """End the running pods of an app by a deadline; delete its pending pods, which have no log."""
    path = collection("v1", "Pod", namespace)
    for pod in api.items(path, f"{names.LABEL_APP}={name}"):
        attempt = Attempt.of(pod)
        if not attempt.lives or attempt.stopping or attempt.deleting:
            continue
        try:
            if attempt.phase == "Pending":
                api.delete(f"{path}/{attempt.pod}")
            else:
                api.patch(f"{path}/{attempt.pod}", {"spec": {"activeDeadlineSeconds": DEADLINE}})
        except KubernetesError as error:
            if error.status != 403:
                raise
            # A user without the right to patch pods may have the right to delete them.
            api.delete(f"{path}/{attempt.pod}")
