# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Mode ``job``: one Indexed Job of core Kubernetes for each role, a headless Service and a Secret for all of them.

The Service gives each pod a name in the DNS that is known before there is a pod, and it is the app's record: how the
app was submitted and whether we have ended it stand in its annotations. It and the Secret are owned by all Jobs
together, so they go when the last of those is gone, by whatever hand.
"""

from __future__ import annotations

import os

from torchx.specs import AppDef, Role

from torchx_monarch.backends.kubernetes import names, pods
from torchx_monarch.backends.kubernetes.options import KubernetesOpts
from torchx_monarch.backends.kubernetes.request import KubernetesRequest, Object
from torchx_monarch.backends.protocols import PLACEHOLDER


def render(app: AppDef, cfg: KubernetesOpts, namespace: str, record: dict[str, str]) -> KubernetesRequest:
    """The objects of an app.

    Args:
        app: as it is to run.
        cfg: the run options.
        namespace: where.
        record: the annotations of the app's record.

    Raises:
        ValueError: a name has too many characters.
    """
    app_id = names.app_id(app.name)
    jobs = names.job_names(app_id, [role.name for role in app.roles])
    for role, job in zip(app.roles, jobs, strict=True):
        last = f"replica {role.name}/{role.num_replicas - 1}"
        names.check_host_name(f"{job}-{role.num_replicas - 1}", last)
    # The Service's name is that of the pods' domain: this is enough within the namespace.
    hosts = [f"{job}-0.{app_id}" for job in jobs]
    # The record first: a submission that is killed leaves what `torchx list` shows and `torchx delete` removes.
    objects = [_service(app_id, cfg, record), secret(app_id, cfg)]
    objects += [_job(app, index, app_id, namespace, job, cfg, hosts) for index, job in enumerate(jobs)]
    return KubernetesRequest("job", namespace, app_id, objects)


def secret(app_id: str, cfg: KubernetesOpts) -> Object:
    """The Secret with an app's credentials."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(app_id, app_id, cfg),
        "type": "Opaque",
        "stringData": {pods.SECRET_KEY: PLACEHOLDER},
    }


def _service(app_id: str, cfg: KubernetesOpts, record: dict[str, str]) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {**_metadata(app_id, app_id, cfg), "annotations": record},
        # Hosts look for each other before any of them is ready.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {names.LABEL_APP: app_id}},
    }


def _metadata(name: str, app_id: str, cfg: KubernetesOpts) -> Object:
    return {"name": name, "labels": {names.LABEL_APP: app_id, **(cfg.labels or {})}}


def _job(
    app: AppDef, index: int, app_id: str, namespace: str, name: str, cfg: KubernetesOpts, hosts: list[str]
) -> Object:
    role = app.roles[index]
    template = pods.template(app, index, app_id, namespace, cfg, hosts)
    metadata = _metadata(name, app_id, cfg)
    metadata["labels"][names.LABEL_ROLE] = str(index)
    if cfg.annotations:
        metadata["annotations"] = dict(cfg.annotations)
    if cfg.kueue_queue:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = cfg.kueue_queue
    if cfg.kueue_priority:
        metadata["labels"]["kueue.x-k8s.io/priority-class"] = cfg.kueue_priority
    spec: Object = {
        "completionMode": "Indexed",
        "completions": role.num_replicas,
        "parallelism": role.num_replicas,
        **_retries(role, pods.is_host(template)),
        "template": template,
    }
    if cfg.ttl_seconds_after_finished is not None:
        spec["ttlSecondsAfterFinished"] = cfg.ttl_seconds_after_finished
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def _retries(role: Role, hosts: bool) -> Object:
    """``max_retries`` as Kubernetes has it: how often each index may fail before the Job has.

    One mapping does for all policies, for the hosts themselves tell them apart. Under APPLICATION and ROLE every host
    of the role ends with the verdict when one is lost, and each of their pods is replaced once: that is one retry.
    Under REPLICA the others live on, and the lost one alone is replaced.
    """
    rules: list[Object] = [
        # By this code a program asks for no other start. The index alone: with the Job, Kubernetes would delete the
        # pods that are about to say why.
        {"action": "FailIndex", "onExitCodes": {"operator": "In", "values": [os.EX_CONFIG]}}
    ]
    if role.max_retries > 0:
        # A pod that Kubernetes takes away (drained node, preemption, eviction) is replaced and costs no retry.
        rules.append({"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]})
    spec: Object = {
        "backoffLimitPerIndex": role.max_retries,
        "podFailurePolicy": {"rules": rules},
        "podReplacementPolicy": "Failed",  # never two pods of one name at a time
    }
    if not hosts:
        # Nobody tells the others that one has failed for good. (Hosts do, and Kubernetes would delete their logs.)
        spec["maxFailedIndexes"] = role.num_replicas - role.min_replicas if role.min_replicas is not None else 0
    return spec
