# SPDX-License-Identifier: BSD-3-Clause
"""Render the objects of mode ``job``: an Indexed Job for each role, one headless Service and one Secret for the app.

The Service gives each pod a DNS name that is known before the pod exists. It is also the app's record: its annotations
hold the submitted app and whether this scheduler has ended it. All Jobs together own the Service and the Secret, so
Kubernetes deletes these two when the last Job is deleted, with whatever tool.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from torchx.schedulers.kubernetes_scheduler import LABEL_REPLICA_ID, pod_labels, role_to_pod, sanitize_for_serialization
from torchx.specs import AppDef, Role, macros
from torchx.specs.overlays import get_overlay

from torchx_monarch.backends.kubernetes import pods, request
from torchx_monarch.backends.kubernetes.options import KubernetesOpts
from torchx_monarch.backends.kubernetes.request import KubernetesRequest, Object
from torchx_monarch.model.env_names import RANK0_HOST
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.torchx_adapter import torchx_api

_INDEX = "JOB_COMPLETION_INDEX"
_INDEX_ANNOTATION = "metadata.annotations['batch.kubernetes.io/job-completion-index']"

_REPLICA = "<torchx-monarch:replica>"
"""Placeholder for the replica's number, replaced by ``$(JOB_COMPLETION_INDEX)`` after the user's text is escaped."""


def render(
    app: AppDef, specs: Sequence[RoleSpec], cfg: KubernetesOpts, namespace: str, record: dict[str, str]
) -> KubernetesRequest:
    """Return the request for an app."""
    app_id = request.new_app_id(app.name)
    jobs = request.job_names(app_id, [role.name for role in app.roles])
    # The pods' subdomain is the Service's name. POD.SERVICE resolves within the namespace.
    context = pods.PodContext(app_id, namespace, cfg, [f"{job}-0.{app_id}" for job in jobs])
    metadata: Object = {"name": app_id, "labels": {request.LABEL_APP: app_id, **(cfg.labels or {})}}
    service: Object = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {**metadata, "annotations": record},
        # Hosts resolve each other's names before their pods are ready.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {request.LABEL_APP: app_id}},
    }
    # The record first: after a submission that is killed, `torchx list` shows the app and `torchx delete` removes it.
    objects = [service, request.secret(metadata)]
    for index, (job, spec) in enumerate(zip(jobs, specs, strict=True)):
        objects.append(_job(job, index, spec, metadata["labels"], cfg, _template(app, index, spec.runs_hosts, context)))
    return KubernetesRequest("job", namespace, app_id, objects)


def _job(name: str, index: int, spec: RoleSpec, labels: Object, cfg: KubernetesOpts, template: Object) -> Object:
    kueue = {"kueue.x-k8s.io/queue-name": cfg.kueue_queue, "kueue.x-k8s.io/priority-class": cfg.kueue_priority}
    labels = {**labels, request.LABEL_ROLE: str(index), **{label: value for label, value in kueue.items() if value}}
    job: Object = {
        "completionMode": "Indexed",
        "completions": spec.replicas,
        "parallelism": spec.replicas,
        **_retries(spec),
        "template": template,
    }
    if cfg.ttl_seconds_after_finished is not None:
        job["ttlSecondsAfterFinished"] = cfg.ttl_seconds_after_finished
    metadata = {"name": name, "labels": labels, "annotations": dict(cfg.annotations or {})}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job}


def _retries(spec: RoleSpec) -> Object:
    """Return the fields of a Job that implement ``max_retries``: how often each index may fail before the Job fails.

    One mapping serves all retry policies, because the hosts implement the policy. Under APPLICATION and ROLE every host
    of the role exits with the result when one host is lost, and Kubernetes replaces each of their pods once: one
    retry. Under REPLICA the other hosts go on, and Kubernetes replaces the lost pod alone.
    """
    # A program exits with EX_CONFIG to ask for no restart. FailIndex, not FailJob: when a Job fails, Kubernetes
    # deletes its running pods, which have yet to report the cause.
    rules: list[Object] = [{"action": "FailIndex", "onExitCodes": {"operator": "In", "values": [os.EX_CONFIG]}}]
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


def _template(app: AppDef, index: int, runs_hosts: bool, context: pods.PodContext) -> Object:
    """Return the pod template of a role, the same for all of its replicas."""
    role, cfg = app.roles[index], context.cfg
    values = macros.Values(img_root="", app_id=context.app_id, replica_id=_REPLICA, rank0_env=RANK0_HOST)
    applied: Role = values.apply(role)
    applied.env["TORCHX_IMAGE"] = applied.image  # as in TorchX
    pod = role_to_pod(
        "main", applied, cfg.service_account, cfg.reserved_millicpu, cfg.reserved_memmb, cfg.efa_device_count
    )
    if overlay := get_overlay(role, "kubernetes", "V1Pod"):
        torchx_api.apply_pod_overlay(pod, overlay)
    made: Object = sanitize_for_serialization(pod)
    labels = pod_labels(app=app, role_idx=index, role=role, replica_id=0, app_id=context.app_id)
    del labels[LABEL_REPLICA_ID]
    made["metadata"].setdefault("labels", {}).update(labels)
    pods.complete(made, index, runs_hosts, context)
    spec = made["spec"]
    spec["subdomain"] = context.app_id
    container = spec["containers"][0]
    # A variable can refer only to variables before it, and Kubernetes appends its own JOB_COMPLETION_INDEX at the end.
    position = {"name": _INDEX, "valueFrom": {"fieldRef": {"fieldPath": _INDEX_ANNOTATION}}}
    container["env"] = [position, *container["env"]]
    container["command"] = [word.replace(_REPLICA, f"$({_INDEX})") for word in container["command"]]
    for variable in container["env"]:
        if "value" in variable:
            variable["value"] = variable["value"].replace(_REPLICA, f"$({_INDEX})")
    # TorchX's role_to_pod takes over the instance type only.
    selected = {name: str(value) for name, value in role.resource.capabilities.items() if "/" in name}
    spec["nodeSelector"] = {**selected, **(spec.get("nodeSelector") or {})}
    return {"metadata": made["metadata"], "spec": spec}
