# SPDX-License-Identifier: BSD-3-Clause
"""Add to TorchX's pods (``role_to_pod``) what hosts and the run options need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchx_monarch.backends.core.state import HOST_EXTRA
from torchx_monarch.backends.kubernetes import options
from torchx_monarch.backends.kubernetes.options import KubernetesOpts
from torchx_monarch.backends.kubernetes.request import LABEL_APP, LABEL_ROLE, SECRET_KEY, TERMINATION_VARIABLE, Object
from torchx_monarch.model.env_names import CREDENTIALS, RANK0_HOST, replica0_variable

_HANDLE = "TORCHX_JOB_ID"
_TERMINATION_LOG = "/dev/termination-log"


@dataclass(frozen=True)
class PodContext:
    """The properties that the pods of all roles of an app share.

    Attributes:
        app_id: the app's id without the namespace; also the name of its Service and its Secret.
        hosts: the host name of each role's replica 0, in the order of the roles.
    """

    app_id: str
    namespace: str
    cfg: KubernetesOpts
    hosts: Sequence[str]


def complete(pod: Object, role_index: int, runs_hosts: bool, context: PodContext) -> None:
    """Change a pod made by ``role_to_pod``, in place, as both modes need it."""
    metadata, spec, cfg = pod["metadata"], pod["spec"], context.cfg
    labels = {LABEL_APP: context.app_id, **(cfg.labels or {}), LABEL_ROLE: str(role_index)}
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
    container["terminationMessagePath"] = _TERMINATION_LOG
    # A container without a host process, or whose host has not begun (such as an image without Python), writes no
    # termination message; its last log lines then serve as one.
    container["terminationMessagePolicy"] = "FallbackToLogsOnError"
    # Kubernetes expands $(NAME) and turns $$ into $. TorchX does not escape the user's own text against this.
    container["command"] = [word.replace("$", "$$") for word in container.get("command", ())]
    added = _variables(runs_hosts, context)
    names = {variable["name"] for variable in added}
    variables = [dict(variable) for variable in container.get("env", ()) if variable["name"] not in names]
    for variable in variables:
        if variable["name"] == _HANDLE:  # TorchX omits the namespace, and no app has that handle
            handle = variable["value"]
            variable["value"] = handle.replace(f"/{context.app_id}", f"/{context.namespace}:{context.app_id}")
        if "value" in variable:
            variable["value"] = variable["value"].replace("$", "$$")
    container["env"] = [*added, *variables]


def _exclude_nodes(spec: Object, nodes: Sequence[str]) -> None:
    """Keep a pod off some nodes, in place, beside what its affinity requires already."""
    node = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = node.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    # A node is suitable if one of the terms applies.
    for term in required.setdefault("nodeSelectorTerms", [{}]):
        rule = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": list(nodes)}
        term.setdefault("matchExpressions", []).append(rule)


def _variables(runs_hosts: bool, context: PodContext) -> list[Object]:
    """Return the environment variables that a pod gets beside those of its role, which they override."""
    hosts = {RANK0_HOST: context.hosts[0]}
    # Controllers connect to replica 0 of the other roles.
    hosts.update({replica0_variable(index): host for index, host in enumerate(context.hosts)})
    added: list[Object] = [{"name": name, "value": host} for name, host in hosts.items()]
    if runs_hosts:
        # From a Secret, so that descriptions of the pod do not contain the private key.
        reference = {"secretKeyRef": {"name": context.app_id, "key": SECRET_KEY}}
        added.append({"name": CREDENTIALS, "valueFrom": reference})
        added.append({"name": TERMINATION_VARIABLE, "value": _TERMINATION_LOG})
        # The address, not the name: the cluster's DNS knows a pod some seconds after its start.
        added.append({"name": "MONARCH_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}})
        added.append({"name": "MONARCH_HOST_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    return added
