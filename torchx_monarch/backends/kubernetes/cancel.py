# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How an app is ended: in mode ``job`` so that its logs stay.

Kubernetes ends pods by deleting them, and their logs with them: so does a Job that is deleted or suspended. Here the
Jobs are deleted and their pods left, and each pod is given a deadline that has passed: its node then ends it as any
other, with SIGTERM and the grace, and it stays, with its log, until the app is deleted.
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
    """End what lives of an app; returns at once.

    Args:
        api: the cluster.
        namespace: of the app.
        name: of the app.
        jobs: all of it.
        living: those of them that may go on.
        ended: what its record is to say.

    Raises:
        KubernetesError: the record or the Jobs cannot be changed. All of it can be tried again.
    """
    others = [owner(job) for job in jobs if job not in living]
    # Without the Jobs that own it, the record would go as well.
    changed = {"metadata": {"annotations": {names.ANNOTATION_ENDED: _note(ended)}, "ownerReferences": others or None}}
    api.patch(f"{collection('v1', 'Service', namespace)}/{name}", changed)
    for job in living:
        api.delete(f"{collection('batch/v1', 'Job', namespace)}/{job['metadata']['name']}", "Orphan")
    _stop_pods(api, namespace, name)


def abort(api: Api, path: str, ended: Ended) -> None:
    """End Volcano's job at this path, as TorchX does.

    Raises:
        KubernetesError: it cannot be changed.
    """
    api.patch(path, {"metadata": {"annotations": {names.ANNOTATION_ENDED: _note(ended)}}})
    while (job := api.find(path)) is not None:
        job.setdefault("status", {}).setdefault("state", {})["phase"] = "Aborted"
        try:
            api.replace_status(path, job)
            return
        except KubernetesError as error:
            if error.status != 409:  # Volcano has written meanwhile, at which upstream gives up
                raise


def _note(ended: Ended) -> str:
    return json.dumps({"state": ended.state.name, "msg": ended.msg, "time": time.time()})


def _stop_pods(api: Api, namespace: str, name: str) -> None:
    """Stop the pods that live; those that have no container yet are deleted."""
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
            api.delete(f"{path}/{one.pod}")  # who may not change pods may delete them, and loses the log
