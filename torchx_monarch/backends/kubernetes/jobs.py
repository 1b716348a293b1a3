# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Render the objects of mode ``job``: an Indexed Job for each role, one headless Service and one Secret for the app.

The Service gives each pod a DNS name that is known before the pod exists. It is also the app's record: its annotations
hold the submitted app and whether this scheduler has ended it. All Jobs together own the Service and the Secret, so
Kubernetes deletes these two when the last Job is deleted, with whatever tool.
"""

from __future__ import annotations

import os

from torchx.specs import AppDef, Role

from torchx_monarch.backends.kubernetes import names, pods
from torchx_monarch.backends.kubernetes.options import KubernetesOpts
from torchx_monarch.backends.kubernetes.request import KubernetesRequest, Object
from torchx_monarch.backends.protocols import PLACEHOLDER


def render(app: AppDef, cfg: KubernetesOpts, namespace: str, record: dict[str, str]) -> KubernetesRequest:
    """Return the request for an app.

    Args:
        app: the app, with wrapped commands.
        cfg: the run options.
        namespace: the namespace of all objects.
        record: the annotations of the app's record.

    Raises:
        ValueError: the host name of a pod would be too long.
    """
    app_id = names.app_id(app.name)
    jobs = names.job_names(app_id, [role.name for role in app.roles])
    for role, job in zip(app.roles, jobs, strict=True):
        last = f"replica {role.name}/{role.num_replicas - 1}"
        names.check_host_name(f"{job}-{role.num_replicas - 1}", last)
    # The pods' subdomain is the Service's name. POD.SERVICE resolves within the namespace.
    hosts = [f"{job}-0.{app_id}" for job in jobs]
    # The record first: after a submission that is killed, `torchx list` shows the app and `torchx delete` removes it.
    objects = [_service(app_id, cfg, record), secret(app_id, cfg)]
    objects += [_job(app, index, app_id, namespace, job, cfg, hosts) for index, job in enumerate(jobs)]
    return KubernetesRequest("job", namespace, app_id, objects)


def secret(app_id: str, cfg: KubernetesOpts) -> Object:
    """Return the Secret that holds the credentials of an app's hosts."""
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
        # Hosts resolve each other's names before their pods are ready.
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
    """Return the fields of a Job that implement ``max_retries``: how often each index may fail before the Job fails.

    One mapping serves all retry policies, because the hosts implement the policy. Under APPLICATION and ROLE every host
    of the role exits with the verdict when one host is lost, and Kubernetes replaces each of their pods once: one
    retry. Under REPLICA the other hosts go on, and Kubernetes replaces the lost pod alone.

    Args:
        role: the role.
        hosts: whether its pods run host processes.
    """
    rules: list[Object] = [
        # A program exits with EX_CONFIG to ask for no restart. FailIndex, not FailJob: when a Job fails, Kubernetes
        # deletes its running pods, which have yet to report the cause.
        {"action": "FailIndex", "onExitCodes": {"operator": "In", "values": [os.EX_CONFIG]}}
    ]
    if role.max_retries > 0:
        # Pods lost to a drained node, preemption or eviction are replaced without counting as a retry.
        rules.append({"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]})
    spec: Object = {
        "backoffLimitPerIndex": role.max_retries,
        "podFailurePolicy": {"rules": rules},
        "podReplacementPolicy": "Failed",  # never two pods with one host name at a time
    }
    if not hosts:
        # Without host processes only the Job can end the other replicas. Host processes end each other, and a Job that
        # fails would delete their pods and logs.
        spec["maxFailedIndexes"] = role.num_replicas - role.min_replicas if role.min_replicas is not None else 0
    return spec
