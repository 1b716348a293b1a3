# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""From a role to the template of its pods: TorchX's pod (``role_to_pod``), and what hosts need beyond it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchx.schedulers.kubernetes_scheduler import (
    LABEL_REPLICA_ID,
    _apply_pod_overlay,
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

HOST_EXTRA = 10
"""Seconds that a pod gets beyond the grace: within the grace the host in it ends its ranks."""

RANK0 = "TORCHX_RANK0_HOST"
INDEX = "JOB_COMPLETION_INDEX"
_HANDLE = "TORCHX_JOB_ID"
TERMINATION_LOG = "/dev/termination-log"
SECRET_KEY = "credentials"

_INDEX_ANNOTATION = "metadata.annotations['batch.kubernetes.io/job-completion-index']"

_REPLICA = "<torchx-monarch:replica>"
"""Stands for the number of the replica until what is the user's own has been escaped."""


def template(app: AppDef, index: int, app_id: str, namespace: str, cfg: KubernetesOpts, hosts: Sequence[str]) -> Object:
    """The template of a role's pods in mode ``job``: one for all of its replicas.

    Args:
        app: the app.
        index: which of its roles.
        app_id: without the namespace; also the name of the Service and the Secret.
        namespace: of the app.
        cfg: the run options.
        hosts: the name of each role's replica 0, in their order, for all pods of the app.
    """
    role = app.roles[index]
    values = macros.Values(img_root="", app_id=app_id, replica_id=_REPLICA, rank0_env=RANK0)
    applied: Role = values.apply(role)
    applied.env["TORCHX_IMAGE"] = applied.image  # as upstream does
    pod = role_to_pod(
        "main", applied, cfg.service_account, cfg.reserved_millicpu, cfg.reserved_memmb, cfg.efa_device_count
    )
    if overlay := get_overlay(role, "kubernetes", "V1Pod"):
        _apply_pod_overlay(pod, overlay)
    made: Object = sanitize_for_serialization(pod)
    labels = pod_labels(app=app, role_idx=index, role=role, replica_id=0, app_id=app_id)
    del labels[LABEL_REPLICA_ID]
    made["metadata"].setdefault("labels", {}).update(labels)
    finish(made, app_id, namespace, cfg, where(hosts))
    made["metadata"]["labels"][LABEL_ROLE] = str(index)
    spec = made["spec"]
    spec["subdomain"] = app_id
    container = spec["containers"][0]
    # Defined before all that refers to it: Kubernetes would add its own behind the others.
    position = {"name": INDEX, "valueFrom": {"fieldRef": {"fieldPath": _INDEX_ANNOTATION}}}
    container["env"] = [position, *container["env"]]
    container["command"] = [_with_index(word) for word in container.get("command", ())]
    for variable in container["env"]:
        if "value" in variable:
            variable["value"] = _with_index(variable["value"])
    # Upstream knows of the instance type alone.
    selected = {name: str(value) for name, value in role.resource.capabilities.items() if "/" in name}
    spec["nodeSelector"] = {**selected, **(spec.get("nodeSelector") or {})}
    return {"metadata": made["metadata"], "spec": spec}


def finish(pod: Object, app_id: str, namespace: str, cfg: KubernetesOpts, variables: list[tuple[str, str]]) -> None:
    """What both modes change in a pod that ``role_to_pod`` has made, in place.

    Args:
        app_id: without the namespace; also the name of the Secret with the credentials.
        namespace: of the app.
        variables: further ones, which come before the role's own.
    """
    metadata, spec = pod["metadata"], pod["spec"]
    metadata.setdefault("labels", {}).update({LABEL_APP: app_id, **(cfg.labels or {})})
    metadata.setdefault("annotations", {}).update(cfg.annotations or {})
    spec["terminationGracePeriodSeconds"] = cfg.grace + HOST_EXTRA
    # The command would be process 1, which the kernel keeps from every signal that it does not handle: a shell, or an
    # interpreter that is still importing, would take all of the grace.
    spec.setdefault("shareProcessNamespace", True)
    spec.setdefault("enableServiceLinks", False)  # else a variable or ten for each Service of the namespace
    if cfg.image_secret:
        spec.setdefault("imagePullSecrets", []).append({"name": cfg.image_secret})
    if cfg.priority_class:
        spec["priorityClassName"] = cfg.priority_class
    if cfg.node_selector:
        spec.setdefault("nodeSelector", {}).update(cfg.node_selector)
    container = spec["containers"][0]
    container["terminationMessagePath"] = TERMINATION_LOG
    # What is no host of ours leaves its last lines.
    container["terminationMessagePolicy"] = "FallbackToLogsOnError"
    # Kubernetes expands $(NAME), and makes one dollar of two; upstream lets it do so to the user's own words.
    container["command"] = [_escaped(word) for word in container.get("command", ())]
    for one in container.get("env", ()):
        if one["name"] == _HANDLE and "value" in one:
            # Upstream leaves out the namespace, and nobody finds an app of that handle.
            one["value"] = one["value"].replace(f"/{app_id}", f"/{namespace}:{app_id}")
    theirs = [_escaped_variable(one) for one in container.get("env", ()) if one["name"] not in dict(variables)]
    ours: list[Object] = [{"name": name, "value": value} for name, value in variables]
    hosts = [one for one in theirs if one["name"] == CREDENTIALS]
    if hosts:
        # In no description of the pod stands the key.
        hosts[0].clear()
        hosts[0].update(name=CREDENTIALS, valueFrom={"secretKeyRef": {"name": app_id, "key": SECRET_KEY}})
        ours.append({"name": "MONARCH_TERMINATION_LOG", "value": TERMINATION_LOG})
        # In the DNS a pod's name comes some seconds after the pod.
        ours.append({"name": "MONARCH_HOST_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    if not any(one["name"] == "PYTHONUNBUFFERED" for one in theirs):
        # What a program writes into a pipe comes in blocks; people who follow a log want lines.
        ours.append({"name": "PYTHONUNBUFFERED", "value": "1"})
    container["env"] = [*ours, *theirs]


def where(hosts: Sequence[str]) -> list[tuple[str, str]]:
    """The variables in which every pod finds the replica 0 of each role; a controller looks for those of the others."""
    return [(RANK0, hosts[0]), *((replica0_variable(index), host) for index, host in enumerate(hosts))]


def is_host(pod: Object) -> bool:
    """Whether a host process of ours runs in it, which ends when another one of its role has failed."""
    return any(one["name"] == CREDENTIALS for one in pod["spec"]["containers"][0].get("env", ()))


def _escaped_variable(one: dict[str, Any]) -> dict[str, Any]:
    return {**one, "value": _escaped(one["value"])} if "value" in one else one


def _escaped(text: str) -> str:
    return text.replace("$", "$$")


def _with_index(text: str) -> str:
    return text.replace(_REPLICA, f"$({INDEX})")
