# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""End an app; in mode ``job``, keep the logs of its pods.

Kubernetes ends pods by deleting them together with their logs; deleting or suspending a Job does the same. So the Jobs
are deleted with their pods orphaned, and each pod gets an ``activeDeadlineSeconds`` that has already passed. The
kubelet then ends the pod with SIGTERM and its grace period, and the pod stays, with its log, until the app is deleted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from torchx_monarch.backends.kubernetes import names
from torchx_monarch.backends.kubernetes.api import Api, KubernetesError
from torchx_monarch.backends.kubernetes.request import Object, collection, owner
from torchx_monarch.backends.kubernetes.status import DEADLINE, Ended, attempt


def end(api: Api, namespace: str, name: str, jobs: Sequence[Object], living: Sequence[Object], ended: Ended) -> None:
    """Start to end the pods of an app in mode ``job``; return without waiting for them.

    Args:
        api: the cluster.
        namespace: the app's namespace.
        name: the app's id without the namespace.
        jobs: all Jobs of the app.
        living: the Jobs among ``jobs`` that may still start or run pods.
        ended: the result of the app, which is noted in its record.

    Raises:
        KubernetesError: the record, a Job or a pod cannot be changed. The call can be repeated.
    """
    others = [owner(job) for job in jobs if job not in living]
    # The record must no longer be owned by Jobs that are deleted below: Kubernetes would delete it with its last owner.
    changed = {"metadata": {"annotations": {names.ANNOTATION_ENDED: _note(ended)}, "ownerReferences": others or None}}
    api.patch(f"{collection('v1', 'Service', namespace)}/{name}", changed)
    for job in living:
        api.delete(f"{collection('batch/v1', 'Job', namespace)}/{job['metadata']['name']}", "Orphan")
    _stop_pods(api, namespace, name)


def abort(api: Api, path: str, ended: Ended) -> None:
    """End a Volcano job as TorchX does, by setting its phase to Aborted.

    Args:
        api: the cluster.
        path: URL path of the job.
        ended: the result of the app, which is noted in the job's annotations.

    Raises:
        KubernetesError: the job cannot be changed.
    """
    api.patch(path, {"metadata": {"annotations": {names.ANNOTATION_ENDED: _note(ended)}}})
    while (job := api.find(path)) is not None:
        job.setdefault("status", {}).setdefault("state", {})["phase"] = "Aborted"
        try:
            api.replace_status(path, job)
            return
        except KubernetesError as error:
            if error.status != 409:  # Volcano changed the job in between; TorchX gives up here
                raise


def _note(ended: Ended) -> str:
    return json.dumps({"state": ended.state.name, "msg": ended.msg, "time": time.time()})


def _stop_pods(api: Api, namespace: str, name: str) -> None:
    """End the running pods of an app by a deadline; delete its pending pods, which have no log."""
    path = collection("v1", "Pod", namespace)
    for pod in api.items(path, f"{names.LABEL_APP}={name}"):
        one = attempt(pod)
        if not one.lives or one.stopping or one.deleting:
            continue
        try:
            if one.phase == "Pending":
                api.delete(f"{path}/{one.pod}")
            else:
                api.patch(f"{path}/{one.pod}", {"spec": {"activeDeadlineSeconds": DEADLINE}})
        except KubernetesError as error:
            if error.status != 403:
                raise
            api.delete(f"{path}/{one.pod}")  # a user without the right to patch pods may have the right to delete them
