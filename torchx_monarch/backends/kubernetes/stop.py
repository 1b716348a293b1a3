# SPDX-License-Identifier: BSD-3-Clause
"""End an app and, in mode ``job``, keep the logs of its pods; remove an app.

Kubernetes ends pods by deleting them together with their logs; deleting or suspending a Job does the same. So the Jobs
are deleted with their pods orphaned, and each pod gets an ``activeDeadlineSeconds`` that has already passed. The
kubelet then ends the pod with SIGTERM and its grace period, and the pod stays, with its log, until the app is deleted.
"""

from __future__ import annotations

import json
import time

from torchx_monarch.backends.core.snapshot import Outcome
from torchx_monarch.backends.kubernetes import names
from torchx_monarch.backends.kubernetes.attempts import DEADLINE, Attempt
from torchx_monarch.backends.kubernetes.native import Api, KubernetesError
from torchx_monarch.backends.kubernetes.request import Object, collection, owner, path_of
from torchx_monarch.backends.kubernetes.snapshot import KubernetesSnapshot


def stop(api: Api, app: KubernetesSnapshot, outcome: Outcome) -> None:
    """Start to end the pods of an app; return without waiting for them.

    Args:
        api: the cluster.
        app: the app.
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
