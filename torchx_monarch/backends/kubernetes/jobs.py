# SPDX-License-Identifier: BSD-3-Clause
"""Render the objects of mode ``job``: an Indexed Job for each role, one headless Service and one Secret for the app.

The Service gives each pod a DNS name that is known before the pod exists. It is also the app's record: its annotations
hold the submitted app and whether this scheduler has ended it. All Jobs together own the Service and the Secret, so
Kubernetes deletes these two when the last Job is deleted, with whatever tool.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from torchx.specs import AppDef

from torchx_monarch.backends.kubernetes import names, pods
from torchx_monarch.backends.kubernetes.options import KubernetesOpts
from torchx_monarch.backends.kubernetes.request import KubernetesRequest, Object, secret
from torchx_monarch.model.role_spec import RoleSpec


def render(
    app: AppDef, specs: Sequence[RoleSpec], cfg: KubernetesOpts, namespace: str, record: dict[str, str]
) -> KubernetesRequest:
    """Return the request for an app.

    Raises:
        ValueError: the host name of a pod would be too long.
    """
    app_id = names.app_id(app.name)
    jobs = names.job_names(app_id, [role.name for role in app.roles])
    for role, job in zip(app.roles, jobs, strict=True):
        last = f"replica {role.name}/{role.num_replicas - 1}"
        names.check_host_name(f"{job}-{role.num_replicas - 1}", last)
    # The pods' subdomain is the Service's name. POD.SERVICE resolves within the namespace.
    context = pods.PodContext(app_id, namespace, cfg, [f"{job}-0.{app_id}" for job in jobs])
    # The record first: after a submission that is killed, `torchx list` shows the app and `torchx delete` removes it.
    objects = [_service(app_id, cfg, record), secret(_metadata(app_id, app_id, cfg))]
    for index, (job, spec) in enumerate(zip(jobs, specs, strict=True)):
        template = pods.template(app, index, spec.runs_hosts, context)
        objects.append(_job(job, index, spec, app_id, cfg, template))
    return KubernetesRequest("job", namespace, app_id, objects)


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


def _job(name: str, index: int, spec: RoleSpec, app_id: str, cfg: KubernetesOpts, template: Object) -> Object:
    described = _metadata(name, app_id, cfg)
    described["labels"][names.LABEL_ROLE] = str(index)
    if cfg.annotations:
        described["annotations"] = dict(cfg.annotations)
    if cfg.kueue_queue:
        described["labels"]["kueue.x-k8s.io/queue-name"] = cfg.kueue_queue
    if cfg.kueue_priority:
        described["labels"]["kueue.x-k8s.io/priority-class"] = cfg.kueue_priority
    job: Object = {
        "completionMode": "Indexed",
        "completions": spec.replicas,
        "parallelism": spec.replicas,
        **_retries(spec),
        "template": template,
    }
    if cfg.ttl_seconds_after_finished is not None:
        job["ttlSecondsAfterFinished"] = cfg.ttl_seconds_after_finished
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": described, "spec": job}


def _retries(spec: RoleSpec) -> Object:
    """Return the fields of a Job that implement ``max_retries``: how often each index may fail before the Job fails.

    One mapping serves all retry policies, because the hosts implement the policy. Under APPLICATION and ROLE every host
    of the role exits with the result when one host is lost, and Kubernetes replaces each of their pods once: one
    retry. Under REPLICA the other hosts go on, and Kubernetes replaces the lost pod alone.
    """
    rules: list[Object] = [
        # A program exits with EX_CONFIG to ask for no restart. FailIndex, not FailJob: when a Job fails, Kubernetes
        # deletes its running pods, which have yet to report the cause.
        {"action": "FailIndex", "onExitCodes": {"operator": "In", "values": [os.EX_CONFIG]}}
    ]
    if spec.max_retries > 0:
        # Pods lost to a drained node, preemption or eviction are replaced without counting as a retry.
        rules.append({"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]})
    fields: Object = {
        "backoffLimitPerIndex": spec.max_retries,
        "podFailurePolicy": {"rules": rules},
        "podReplacementPolicy": "Failed",  # never two pods with one host name at a time
    }
    if not spec.runs_hosts:
        # Without host processes only the Job can end the other replicas. Host processes end each other, and a Job that
        # fails would delete their pods and logs.
        fields["maxFailedIndexes"] = spec.replicas - spec.min_replicas if spec.min_replicas is not None else 0
    return fields
