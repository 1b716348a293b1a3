# SPDX-License-Identifier: BSD-3-Clause
"""Render the objects of an app, with TorchX's pods (``role_to_pod``), adapted to hosts and run options.

There is an Indexed Job for each role, and a headless Service and a Secret, which all Jobs together own. The Service is
the app's record: its annotations hold the app and how this scheduler has ended it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from torchx.schedulers.kubernetes_scheduler import (
    LABEL_REPLICA_ID,
    pod_labels,
    role_to_pod,
    sanitize_for_serialization,
)
from torchx.specs import AppDef, Role, macros
from torchx.specs.overlays import get_overlay

from torchx_monarch.backends.core import torchx_api
from torchx_monarch.backends.core.state import HOST_EXTRA
from torchx_monarch.backends.kubernetes import options, request
from torchx_monarch.backends.kubernetes.options import KubernetesOpts
from torchx_monarch.backends.kubernetes.request import (
    LABEL_APP,
    LABEL_ROLE,
    SECRET_KEY,
    TERMINATION_VARIABLE,
    KubernetesRequest,
    Object,
)
from torchx_monarch.model.env_names import CREDENTIALS, RANK0_HOST, replica0_variable
from torchx_monarch.model.role_spec import RoleSpec

_INDEX = "JOB_COMPLETION_INDEX"
_INDEX_ANNOTATION = "metadata.annotations['batch.kubernetes.io/job-completion-index']"

_REPLICA = "<torchx-monarch:replica>"
"""Placeholder for the replica's number, replaced by ``$(JOB_COMPLETION_INDEX)`` after the user's text is escaped."""

_TERMINATION_LOG = "/dev/termination-log"


@dataclass(frozen=True)
class _PodContext:
    """The properties that the pods of all roles of an app share.

    Attributes:
        app_id: the app's id without the namespace; also the name of its Service and its Secret.
        hosts: the host name of each role's replica 0, in the order of the roles.
    """

    app_id: str
    namespace: str
    cfg: KubernetesOpts
    hosts: Sequence[str]


def render_app(
    app: AppDef, specs: Sequence[RoleSpec], cfg: KubernetesOpts, namespace: str, record: dict[str, str]
) -> KubernetesRequest:
    """Return the request for an app."""
    app_id = request.new_app_id(app.name)
    jobs = request.job_names(app_id, [role.name for role in app.roles])
    # The pods' subdomain is the Service's name. POD.SERVICE resolves within the namespace.
    context = _PodContext(app_id, namespace, cfg, [f"{job}-0.{app_id}" for job in jobs])
    metadata: Object = {"name": app_id, "labels": {LABEL_APP: app_id, **(cfg.labels or {})}}
    service: Object = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {**metadata, "annotations": record},
        # Hosts resolve each other's names before their pods are ready.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {LABEL_APP: app_id}},
    }
    # The record first: after a submission that is killed, `torchx list` shows the app and `torchx delete` removes it.
    objects = [service, request.secret(metadata)]
    for index, (job, spec) in enumerate(zip(jobs, specs, strict=True)):
        objects.append(_job(job, index, spec, metadata["labels"], cfg, _template(app, index, spec.runs_hosts, context)))
    return KubernetesRequest(namespace, app_id, objects)


def _job(name: str, index: int, spec: RoleSpec, labels: Object, cfg: KubernetesOpts, template: Object) -> Object:
    labels = {**labels, LABEL_ROLE: str(index)}
    if cfg.kueue_queue:
        labels["kueue.x-k8s.io/queue-name"] = cfg.kueue_queue
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
    """Return a Job's fields for ``max_retries``, the same for all policies: hosts end together by themselves."""
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


def _template(app: AppDef, index: int, runs_hosts: bool, context: _PodContext) -> Object:
    """Return the pod that TorchX renders for a role, adapted to its host and the run options."""
    role, cfg = app.roles[index], context.cfg
    values = macros.Values(img_root="", app_id=context.app_id, replica_id=_REPLICA, rank0_env=RANK0_HOST)
    applied: Role = values.apply(role)
    applied.env["TORCHX_IMAGE"] = applied.image  # as in TorchX
    if handle := applied.env.get("TORCHX_JOB_ID"):  # TorchX omits the namespace, and no app has that handle
        applied.env["TORCHX_JOB_ID"] = handle.replace(f"/{context.app_id}", f"/{context.namespace}:{context.app_id}")
    pod = role_to_pod("main", applied, cfg.service_account)
    if overlay := get_overlay(role, "kubernetes", "V1Pod"):
        torchx_api.apply_pod_overlay(pod, overlay)
    made: Object = sanitize_for_serialization(pod)
    metadata, spec = made["metadata"], made["spec"]
    labels = pod_labels(app=app, role_idx=index, role=role, replica_id=0, app_id=context.app_id)
    del labels[LABEL_REPLICA_ID]
    labels.update({LABEL_APP: context.app_id, **(cfg.labels or {}), LABEL_ROLE: str(index)})
    metadata.setdefault("labels", {}).update(labels)
    metadata.setdefault("annotations", {}).update(cfg.annotations or {})
    spec["subdomain"] = context.app_id
    spec["terminationGracePeriodSeconds"] = cfg.grace + int(HOST_EXTRA)
    # Otherwise the command is process 1 of its PID namespace, and the kernel discards signals that process 1 has no
    # handler for: a shell, or an interpreter that is still importing, would last for the whole grace period.
    spec.setdefault("shareProcessNamespace", True)
    spec.setdefault("enableServiceLinks", False)  # service links add several variables per Service of the namespace
    if cfg.image_secret:
        spec.setdefault("imagePullSecrets", []).append({"name": cfg.image_secret})
    if cfg.priority_class:
        spec["priorityClassName"] = cfg.priority_class
    # TorchX's role_to_pod takes over the instance type only.
    selected = {name: str(value) for name, value in role.resource.capabilities.items() if "/" in name}
    spec["nodeSelector"] = {**selected, **(spec.get("nodeSelector") or {}), **(cfg.node_selector or {})}
    if cfg.exclude_nodes:
        _exclude_nodes(spec, cfg.exclude_nodes.split("+"))
    if cfg.tolerations:
        spec.setdefault("tolerations", []).extend(options.parse_toleration(taint) for taint in cfg.tolerations)
    container = spec["containers"][0]
    container["terminationMessagePath"] = _TERMINATION_LOG
    # A container without a host process, or whose host has not begun (such as an image without Python), writes no
    # termination message; its last log lines then serve as one.
    container["terminationMessagePolicy"] = "FallbackToLogsOnError"
    container["command"] = [_expandable(word) for word in container.get("command", ())]
    added = _variables(runs_hosts, context)
    names = {variable["name"] for variable in added}
    variables = [dict(variable) for variable in container.get("env", ()) if variable["name"] not in names]
    for variable in variables:
        if "value" in variable:
            variable["value"] = _expandable(variable["value"])
    container["env"] = [*added, *variables]
    return {"metadata": metadata, "spec": spec}


def _expandable(text: str) -> str:
    """Return a text of the user as Kubernetes, which expands $(NAME) and turns $$ into $, gives it to the container."""
    return text.replace("$", "$$").replace(_REPLICA, f"$({_INDEX})")


def _exclude_nodes(spec: Object, nodes: Sequence[str]) -> None:
    """Keep a pod off some nodes, in place, beside what its affinity requires already."""
    node = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = node.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    # A node is suitable if one of the terms applies.
    for term in required.setdefault("nodeSelectorTerms", [{}]):
        rule = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": list(nodes)}
        term.setdefault("matchExpressions", []).append(rule)


def _variables(runs_hosts: bool, context: _PodContext) -> list[Object]:
    """Return the environment variables that a pod gets beside those of its role, which they override."""
    hosts = {RANK0_HOST: context.hosts[0]}
    # Controllers connect to replica 0 of the other roles.
    hosts.update({replica0_variable(index): host for index, host in enumerate(context.hosts)})
    # A variable can refer only to variables before it, and Kubernetes appends its own JOB_COMPLETION_INDEX at the end.
    added: list[Object] = [{"name": _INDEX, "valueFrom": {"fieldRef": {"fieldPath": _INDEX_ANNOTATION}}}]
    added += [{"name": name, "value": host} for name, host in hosts.items()]
    if runs_hosts:
        # From a Secret, so that descriptions of the pod do not contain the private key.
        reference = {"secretKeyRef": {"name": context.app_id, "key": SECRET_KEY}}
        added.append({"name": CREDENTIALS, "valueFrom": reference})
        added.append({"name": TERMINATION_VARIABLE, "value": _TERMINATION_LOG})
        # The address, not the name: the cluster's DNS knows a pod some seconds after its start.
        added.append({"name": "MONARCH_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}})
        added.append({"name": "MONARCH_HOST_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    return added
