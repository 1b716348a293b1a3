# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Render the pod template of a role: TorchX's pod (``role_to_pod``) with the additions that hosts need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchx.schedulers.kubernetes_scheduler import (
    LABEL_REPLICA_ID,
    pod_labels,
    role_to_pod,
    sanitize_for_serialization,
)
from torchx.specs import AppDef, Role, macros
from torchx.specs.overlays import get_overlay

from torchx_monarch.backends.kubernetes.names import LABEL_APP, LABEL_ROLE
from torchx_monarch.backends.kubernetes.options import KubernetesOpts
from torchx_monarch.backends.kubernetes.request import Object
from torchx_monarch.backends.protocols import CREDENTIALS
from torchx_monarch.model.env_names import replica0_variable
from torchx_monarch.torchx_adapter import torchx_api

HOST_EXTRA = 10
"""Seconds by which a pod's grace period is longer than the run option: in the latter, the host ends its ranks."""

RANK0 = "TORCHX_RANK0_HOST"
INDEX = "JOB_COMPLETION_INDEX"
_HANDLE = "TORCHX_JOB_ID"
TERMINATION_LOG = "/dev/termination-log"
SECRET_KEY = "credentials"

_INDEX_ANNOTATION = "metadata.annotations['batch.kubernetes.io/job-completion-index']"

_REPLICA = "<torchx-monarch:replica>"
"""Placeholder for the replica's number, replaced by ``$(JOB_COMPLETION_INDEX)`` after the user's text is escaped."""


def template(app: AppDef, index: int, app_id: str, namespace: str, cfg: KubernetesOpts, hosts: Sequence[str]) -> Object:
    """Return the pod template of a role in mode ``job``, the same for all of its replicas.

    Args:
        app: the app.
        index: index of the role in the app.
        app_id: the app's id without the namespace; also the name of the Service and the Secret.
        namespace: the app's namespace.
        cfg: the run options.
        hosts: the host name of each role's replica 0, in the order of the roles.
    """
    role = app.roles[index]
    values = macros.Values(img_root="", app_id=app_id, replica_id=_REPLICA, rank0_env=RANK0)
    applied: Role = values.apply(role)
    applied.env["TORCHX_IMAGE"] = applied.image  # as in TorchX
    pod = role_to_pod(
        "main", applied, cfg.service_account, cfg.reserved_millicpu, cfg.reserved_memmb, cfg.efa_device_count
    )
    if overlay := get_overlay(role, "kubernetes", "V1Pod"):
        torchx_api.apply_pod_overlay(pod, overlay)
    made: Object = sanitize_for_serialization(pod)
    labels = pod_labels(app=app, role_idx=index, role=role, replica_id=0, app_id=app_id)
    del labels[LABEL_REPLICA_ID]
    made["metadata"].setdefault("labels", {}).update(labels)
    finish(made, app_id, namespace, cfg, where(hosts))
    made["metadata"]["labels"][LABEL_ROLE] = str(index)
    spec = made["spec"]
    spec["subdomain"] = app_id
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


def finish(pod: Object, app_id: str, namespace: str, cfg: KubernetesOpts, variables: list[tuple[str, str]]) -> None:
    """Change a pod made by ``role_to_pod``, in place, as both modes need it.

    Args:
        pod: the pod, as JSON.
        app_id: the app's id without the namespace; also the name of the Secret with the credentials.
        namespace: the app's namespace.
        cfg: the run options.
        variables: additional environment variables, placed before the role's own and overriding them.
    """
    metadata, spec = pod["metadata"], pod["spec"]
    metadata.setdefault("labels", {}).update({LABEL_APP: app_id, **(cfg.labels or {})})
    metadata.setdefault("annotations", {}).update(cfg.annotations or {})
    spec["terminationGracePeriodSeconds"] = cfg.grace + HOST_EXTRA
    # Otherwise the command is process 1 of its PID namespace, and the kernel discards signals that process 1 has no
    # handler for: a shell, or an interpreter that is still importing, would last for the whole grace period.
    spec.setdefault("shareProcessNamespace", True)
    spec.setdefault("enableServiceLinks", False)  # they add several variables per Service of the namespace
    if cfg.image_secret:
        spec.setdefault("imagePullSecrets", []).append({"name": cfg.image_secret})
    if cfg.priority_class:
        spec["priorityClassName"] = cfg.priority_class
    if cfg.node_selector:
        spec.setdefault("nodeSelector", {}).update(cfg.node_selector)
    container = spec["containers"][0]
    container["terminationMessagePath"] = TERMINATION_LOG
    # A container without a host process writes no termination message; its last log lines then serve as one.
    container["terminationMessagePolicy"] = "FallbackToLogsOnError"
    # Kubernetes expands $(NAME) and turns $$ into $. TorchX does not escape the user's own text against this.
    container["command"] = [_escaped(word) for word in container.get("command", ())]
    for one in container.get("env", ()):
        if one["name"] == _HANDLE and "value" in one:
            # TorchX omits the namespace, and no app has that handle.
            one["value"] = one["value"].replace(f"/{app_id}", f"/{namespace}:{app_id}")
    theirs = [_escaped_variable(one) for one in container.get("env", ()) if one["name"] not in dict(variables)]
    ours: list[Object] = [{"name": name, "value": value} for name, value in variables]
    hosts = [one for one in theirs if one["name"] == CREDENTIALS]
    if hosts:
        # From a Secret, so that descriptions of the pod do not contain the private key.
        hosts[0].clear()
        hosts[0].update(name=CREDENTIALS, valueFrom={"secretKeyRef": {"name": app_id, "key": SECRET_KEY}})
        ours.append({"name": "MONARCH_TERMINATION_LOG", "value": TERMINATION_LOG})
        # The address, not the name: the cluster's DNS knows a pod some seconds after its start.
        ours.append({"name": "MONARCH_HOST_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    if not any(one["name"] == "PYTHONUNBUFFERED" for one in theirs):
        # Python buffers output to a pipe in blocks; a followed log needs lines.
        ours.append({"name": "PYTHONUNBUFFERED", "value": "1"})
    container["env"] = [*ours, *theirs]


def where(hosts: Sequence[str]) -> list[tuple[str, str]]:
    """Return the variables with the host name of each role's replica 0; controllers of other roles connect to them."""
    return [(RANK0, hosts[0]), *((replica0_variable(index), host) for index, host in enumerate(hosts))]


def is_host(pod: Object) -> bool:
    """Whether a pod runs a host process, which exits when another host of its role has failed."""
    return any(one["name"] == CREDENTIALS for one in pod["spec"]["containers"][0].get("env", ()))


def _escaped_variable(one: dict[str, Any]) -> dict[str, Any]:
    return {**one, "value": _escaped(one["value"])} if "value" in one else one


def _escaped(text: str) -> str:
    return text.replace("$", "$$")


def _with_index(text: str) -> str:
    return text.replace(_REPLICA, f"$({INDEX})")
