# SPDX-License-Identifier: BSD-3-Clause
"""Render the pod template of a role: TorchX's pod (``role_to_pod``) with the additions that hosts need."""

from __future__ import annotations

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

from torchx_monarch.backends.core.state import HOST_EXTRA
from torchx_monarch.backends.kubernetes import options
from torchx_monarch.backends.kubernetes.names import LABEL_APP, LABEL_ROLE
from torchx_monarch.backends.kubernetes.options import KubernetesOpts
from torchx_monarch.backends.kubernetes.request import SECRET_KEY, TERMINATION_VARIABLE, Object
from torchx_monarch.model.env_names import CREDENTIALS, replica0_variable
from torchx_monarch.torchx_adapter import torchx_api

RANK0 = "TORCHX_RANK0_HOST"
INDEX = "JOB_COMPLETION_INDEX"
_HANDLE = "TORCHX_JOB_ID"
TERMINATION_LOG = "/dev/termination-log"

_INDEX_ANNOTATION = "metadata.annotations['batch.kubernetes.io/job-completion-index']"

_REPLICA = "<torchx-monarch:replica>"
"""Placeholder for the replica's number, replaced by ``$(JOB_COMPLETION_INDEX)`` after the user's text is escaped."""


@dataclass(frozen=True)
class PodContext:
    """The properties that the pods of all roles of an app share.

    Attributes:
        app_id: the app's id without the namespace; also the name of its Service and its Secret.
        namespace: the app's namespace.
        cfg: the run options.
        hosts: the host name of each role's replica 0, in the order of the roles.
    """

    app_id: str
    namespace: str
    cfg: KubernetesOpts
    hosts: Sequence[str]


def template(app: AppDef, index: int, runs_hosts: bool, context: PodContext) -> Object:
    """Return the pod template of a role in mode ``job``, the same for all of its replicas.

    Args:
        runs_hosts: whether the role's pods run host processes.
    """
    role, cfg = app.roles[index], context.cfg
    values = macros.Values(img_root="", app_id=context.app_id, replica_id=_REPLICA, rank0_env=RANK0)
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
    finish(made, index, runs_hosts, context)
    spec = made["spec"]
    spec["subdomain"] = context.app_id
    container = spec["containers"][0]
    # A variable can refer only to variables before it, and Kubernetes appends its own JOB_COMPLETION_INDEX at the end.
    position = {"name": INDEX, "valueFrom": {"fieldRef": {"fieldPath": _INDEX_ANNOTATION}}}
    container["env"] = [position, *container["env"]]
    container["command"] = [_with_index(word) for word in container.get("command", ())]
    for variable in container["env"]:
        if "value" in variable:
            variable["value"] = _with_index(variable["value"])
    # TorchX's role_to_pod takes over the instance type only.
    selected = {name: str(value) for name, value in role.resource.capabilities.items() if "/" in name}
    spec["nodeSelector"] = {**selected, **(spec.get("nodeSelector") or {})}
    return {"metadata": made["metadata"], "spec": spec}


def finish(pod: Object, index: int, runs_hosts: bool, context: PodContext) -> None:
    """Change a pod made by ``role_to_pod``, in place, as both modes need it.

    Args:
        runs_hosts: whether it runs a host process.
    """
    metadata, spec, cfg = pod["metadata"], pod["spec"], context.cfg
    labels = {LABEL_APP: context.app_id, **(cfg.labels or {}), LABEL_ROLE: str(index)}
    metadata.setdefault("labels", {}).update(labels)
    metadata.setdefault("annotations", {}).update(cfg.annotations or {})
    spec["terminationGracePeriodSeconds"] = cfg.grace + int(HOST_EXTRA)
    # Otherwise the command is process 1 of its PID namespace, and the kernel discards signals that process 1 has no
    # handler for: a shell, or an interpreter that is still importing, would last for the whole grace period.
    spec.setdefault("shareProcessNamespace", True)
    spec.setdefault("enableServiceLinks", False)  # service links add several variables per Service of the namespace
    if cfg.image_secret:
        spec.setdefault("imagePullSecrets", []).append({"name": cfg.image_secret})
    if cfg.priority_class:
        spec["priorityClassName"] = cfg.priority_class
    if cfg.node_selector:
        spec.setdefault("nodeSelector", {}).update(cfg.node_selector)
    if cfg.exclude_nodes:
        _exclude_nodes(spec, cfg.exclude_nodes.split("+"))
    if cfg.tolerations:
        spec.setdefault("tolerations", []).extend(options.parse_toleration(taint) for taint in cfg.tolerations)
    container = spec["containers"][0]
    container["terminationMessagePath"] = TERMINATION_LOG
    # A container without a host process, or whose host has not begun (such as an image without Python), writes no
    # termination message; its last log lines then serve as one.
    container["terminationMessagePolicy"] = "FallbackToLogsOnError"
    # Kubernetes expands $(NAME) and turns $$ into $. TorchX does not escape the user's own text against this.
    container["command"] = [_escaped(word) for word in container.get("command", ())]
    added = _variables(runs_hosts, context)
    names = {variable["name"] for variable in added}
    own_variables = [dict(variable) for variable in container.get("env", ()) if variable["name"] not in names]
    for variable in own_variables:
        if "value" in variable:
            if variable["name"] == _HANDLE:
                # TorchX omits the namespace, and no app has that handle.
                variable["value"] = variable["value"].replace(
                    f"/{context.app_id}", f"/{context.namespace}:{context.app_id}"
                )
            variable["value"] = _escaped(variable["value"])
    container["env"] = [*added, *own_variables]


def _exclude_nodes(spec: Object, nodes: Sequence[str]) -> None:
    """Keep a pod off some nodes, in place, beside what its affinity requires already."""
    affinity = spec.get("affinity") or {}
    node = affinity.get("nodeAffinity") or {}
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = (node.get(required) or {}).get("nodeSelectorTerms") or [{}]
    rule = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": list(nodes)}
    # A node is suitable if one of the terms applies.
    terms = [{**term, "matchExpressions": [*(term.get("matchExpressions") or ()), rule]} for term in terms]
    spec["affinity"] = {**affinity, "nodeAffinity": {**node, required: {"nodeSelectorTerms": terms}}}


def _variables(runs_hosts: bool, context: PodContext) -> list[Object]:
    """Return the environment variables that a pod gets beside those of its role, which they override."""
    # Controllers connect to replica 0 of the other roles.
    names = [RANK0, *(replica0_variable(index) for index in range(len(context.hosts)))]
    found: list[Object] = [
        {"name": name, "value": host} for name, host in zip(names, [context.hosts[0], *context.hosts], strict=True)
    ]
    if runs_hosts:
        # From a Secret, so that descriptions of the pod do not contain the private key.
        reference = {"secretKeyRef": {"name": context.app_id, "key": SECRET_KEY}}
        found.append({"name": CREDENTIALS, "valueFrom": reference})
        found.append({"name": TERMINATION_VARIABLE, "value": TERMINATION_LOG})
        # The address, not the name: the cluster's DNS knows a pod some seconds after its start.
        found.append({"name": "MONARCH_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}})
        found.append({"name": "MONARCH_HOST_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    return found


def _escaped(text: str) -> str:
    return text.replace("$", "$$")


def _with_index(text: str) -> str:
    return text.replace(_REPLICA, f"$({INDEX})")
