# SPDX-License-Identifier: BSD-3-Clause
"""The run options of the Kubernetes scheduler, and the objects that run an app: TorchX's pods, adapted to hosts.

There is an Indexed Job for each role, and a headless Service and a Secret, which all Jobs together own. The Service is
the app's record: its annotations hold the app and how this scheduler has ended it. Options that TorchX's scheduler has
too keep its names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from torchx.schedulers.ids import random_id
from torchx.schedulers.kubernetes_scheduler import LABEL_REPLICA_ID, pod_labels, role_to_pod, sanitize_for_serialization
from torchx.specs import AppDef, InvalidRunConfigException, Role, macros
from torchx.specs.overlays import get_overlay

from torchx_monarch.backends.core import torchx_api
from torchx_monarch.backends.core.options import NetworkOpts, dns_label, role_labels
from torchx_monarch.backends.core.state import HOST_EXTRA
from torchx_monarch.model.env_names import CREDENTIALS, RANK0_HOST, replica0_variables
from torchx_monarch.model.role_spec import RoleSpec

_TAINT = re.compile(r"(?P<key>[^=:\s]+)(=(?P<value>[^=:\s]*))?(:(?P<effect>\w+))?")

Object = dict[str, Any]
"""A Kubernetes object, as decoded from JSON."""

LABEL_APP = "torchx-monarch/app"
"""Label of every object of an app: the app's id without its namespace. Objects without it are not this scheduler's."""

LABEL_ROLE = "torchx-monarch/role"
"""Label of Jobs and pods: the index of the role in the app."""

ANNOTATION_APP = "torchx-monarch/appdef"
"""Annotation of an app's record: the app, packed by ``SubmittedApp.pack``."""

ANNOTATION_OPTIONS = "torchx-monarch/options"
"""Annotation of the record: the run options that a snapshot needs, ``StoredOptions`` as JSON."""

ANNOTATION_ENDED = "torchx-monarch/ended"
"""Annotation of the record: how this scheduler has begun to end the app, an ``Outcome`` as JSON."""

SECRET_KEY = "credentials"
"""The key of an app's Secret."""

TERMINATION_VARIABLE = "MONARCH_TERMINATION_LOG"
"""The variable of a container that runs a host: the file for its termination message."""

_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
"""Pattern of a DNS label."""

_MAX_APP, _MAX_ROLE = 22, 18
# The sum is 63: app 22 + dash 1 + random 14, dash 1 + role 18 + role index 2 if names clash, dash 1 + replica 4.

_INDEX = "JOB_COMPLETION_INDEX"

_INDEX_ANNOTATION = "metadata.annotations['batch.kubernetes.io/job-completion-index']"

_REPLICA = "<torchx-monarch:replica>"
"""Placeholder for the replica's number, replaced by ``$(JOB_COMPLETION_INDEX)`` after the user's text is escaped."""

_TERMINATION_LOG = "/dev/termination-log"


@dataclass
class KubernetesOpts(NetworkOpts):
    namespace: str | None = None
    """The namespace. Default: the namespace of the kubeconfig's context."""

    kueue_queue: str | None = None
    """The Kueue LocalQueue that admits the job; the label `kueue.x-k8s.io/queue-name`."""

    service_account: str | None = None
    """The pods' service account."""

    priority_class: str | None = None
    """The pods' PriorityClass (`priorityClassName`)."""

    image_secret: str | None = None
    """The Secret, in the namespace, with the credentials for pulling images."""

    node_selector: dict[str, str] | None = None
    """Labels that nodes must have: `node_selector=disk:ssd`. Capabilities of a role's resource that are named like node
    labels (`node.kubernetes.io/instance-type`) are required too."""

    exclude_nodes: str | None = None
    """Nodes, by their label `kubernetes.io/hostname`, that the pods must not use, separated by `+`: `node7+node9`."""

    tolerations: list[str] | None = None
    """Taints of nodes that the pods tolerate, spelled as for `kubectl taint`: `tolerations=nvidia.com/gpu:NoSchedule`;
    with a value in quotes, `tolerations='pool=a100:NoSchedule;spot:NoExecute'`. Without an effect, all effects."""

    labels: dict[str, str] | None = None
    """Additional labels of all objects, such as `kueue.x-k8s.io/priority-class:high`."""

    annotations: dict[str, str] | None = None
    """Additional annotations of jobs and pods."""

    ttl_seconds_after_finished: int | None = None
    """Seconds from the end of the app's last role until Kubernetes deletes the app. Default: never."""

    pull_timeout: int = 300
    """Seconds after which the app fails if a pod cannot start because its image, or an object that its container refers
    to, is missing."""

    validate_spec: bool = True
    """Have the API server validate the request (server-side dry run) before it is submitted."""


@dataclass(frozen=True)
class StoredOptions:
    """The run options that are stored with an app."""

    grace: float
    pull_timeout: float


def check_options(cfg: KubernetesOpts) -> None:

    def refuse(name: str, allowed: str) -> None:
        raise InvalidRunConfigException(f"Run option `{name}` is {cfg[name]!r}; {allowed}", name, dict(cfg))

    if cfg.namespace is not None and not is_namespace(cfg.namespace):
        refuse("namespace", "a namespace is called by up to 63 lower-case letters, digits and dashes")
    try:
        for taint in cfg.tolerations or ():
            parse_toleration(taint)
    except ValueError as error:
        refuse("tolerations", str(error))
    for name in ("pull_timeout", "ttl_seconds_after_finished"):
        if (cfg[name] or 0) < 0:
            refuse(name, "allowed is 0 or more")


def parse_toleration(taint: str) -> Object:
    """Return the toleration of a pod for a taint, ``KEY=VALUE:EFFECT``; raise ValueError for what is none.

    Without ``=VALUE`` it stands for all values of the key, without ``:EFFECT`` for all effects.
    """
    found = _TAINT.fullmatch(taint)
    if found is None:
        raise ValueError(f"{taint!r} is not of the form KEY=VALUE:EFFECT, KEY:EFFECT, KEY=VALUE or KEY")
    parts = {name: value for name, value in found.groupdict().items() if value is not None}
    return {**parts, "operator": "Equal" if "value" in parts else "Exists"}


@dataclass
class KubernetesRequest:
    """The request for one app.

    Attributes:
        app_id: the app's id without the namespace.
        objects: the objects in the order of their creation; the jobs own the others.
    """

    namespace: str
    app_id: str
    objects: list[Object]

    def __str__(self) -> str:
        return str(yaml.safe_dump_all(self.objects, sort_keys=False))


def secret(metadata: Object) -> Object:
    """Return the Secret for the credentials of an app's hosts, as yet without them."""
    data = {SECRET_KEY: "(made when the job is submitted)"}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "stringData": data}


def with_credentials(objects: Iterable[Object], credentials: str) -> list[Object]:
    """Return the objects with the credentials in the app's Secret; the arguments are not changed."""
    data = {"stringData": {SECRET_KEY: credentials}}
    return [{**resource, **data} if resource["kind"] == "Secret" else resource for resource in objects]


def new_app_id(name: str) -> str:
    """Return a new app id, without namespace: a DNS label that begins with a letter, as a Service's name must."""
    short = dns_label(name).lstrip("0123456789-")[:_MAX_APP].strip("-") or "app"
    return f"{short}-{random_id(14)}"


def job_names(app_id: str, roles: Sequence[str]) -> list[str]:
    """Return the name of each role's Job. The host name of replica k is this name followed by ``-k``."""
    return [f"{app_id}-{label}" for label in role_labels(roles, _MAX_ROLE)]


def split(app_id: str) -> tuple[str, str] | None:
    """Split an app's id into namespace and name; return None if no app can have this id."""
    namespace, _, name = app_id.partition(":")
    return (namespace, name) if is_namespace(namespace) and re.fullmatch(_LABEL, name) else None


def is_namespace(name: str) -> bool:
    """Whether this is a valid namespace name. Only such a name may become part of a URL."""
    return len(name) <= 63 and re.fullmatch(_LABEL, name) is not None


def collection(api_version: str, kind: str, namespace: str) -> str:
    """Return the URL path of all objects of a kind in a namespace."""
    return f"/{'apis' if '/' in api_version else 'api'}/{api_version}/namespaces/{namespace}/{kind.lower()}s"


def path_of(resource: Object, namespace: str) -> str:
    return f"{collection(resource['apiVersion'], resource['kind'], namespace)}/{resource['metadata']['name']}"


def owner(resource: Object) -> Object:
    """Return an owner reference to an existing object. Kubernetes deletes an object after the last of its owners."""
    metadata = {key: resource["metadata"][key] for key in ("name", "uid")}
    return {"apiVersion": resource["apiVersion"], "kind": resource["kind"], **metadata}


def render_app(
    app: AppDef, specs: Sequence[RoleSpec], cfg: KubernetesOpts, namespace: str, record: dict[str, str]
) -> KubernetesRequest:
    app_id = new_app_id(app.name)
    jobs = job_names(app_id, [role.name for role in app.roles])
    # The pods' subdomain is the Service's name. POD.SERVICE resolves within the namespace.
    hosts = [f"{job}-0.{app_id}" for job in jobs]
    metadata: Object = {"name": app_id, "labels": {LABEL_APP: app_id, **(cfg.labels or {})}}
    service: Object = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {**metadata, "annotations": record},
        # Hosts resolve each other's names before their pods are ready.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {LABEL_APP: app_id}},
    }
    # The record first: after a submission that is killed, `torchx list` shows the app and `torchx delete` removes it.
    request = KubernetesRequest(namespace, app_id, [service, secret(metadata)])
    for index, (job, spec) in enumerate(zip(jobs, specs, strict=True)):
        template = _template(request, app, index, _variables(request, spec.runs_hosts, hosts), cfg)
        request.objects.append(_job(job, index, spec, metadata["labels"], cfg, template))
    return request


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


def _template(
    request: KubernetesRequest, app: AppDef, index: int, added: Sequence[Object], cfg: KubernetesOpts
) -> Object:
    """Return the pod that TorchX renders for a role, adapted to its host and the run options.

    ``added`` are the variables that it gets beside those of its role, which they override.
    """
    role, app_id = app.roles[index], request.app_id
    values = macros.Values(img_root="", app_id=app_id, replica_id=_REPLICA, rank0_env=RANK0_HOST)
    applied: Role = values.apply(role)
    applied.env["TORCHX_IMAGE"] = applied.image  # as in TorchX
    if handle := applied.env.get("TORCHX_JOB_ID"):  # TorchX omits the namespace, and no app has that handle
        applied.env["TORCHX_JOB_ID"] = handle.replace(f"/{app_id}", f"/{request.namespace}:{app_id}")
    pod = role_to_pod("main", applied, cfg.service_account)
    if overlay := get_overlay(role, "kubernetes", "V1Pod"):
        torchx_api.apply_pod_overlay(pod, overlay)
    made: Object = sanitize_for_serialization(pod)
    metadata, spec = made["metadata"], made["spec"]
    labels = pod_labels(app=app, role_idx=index, role=role, replica_id=0, app_id=app_id)
    del labels[LABEL_REPLICA_ID]
    labels.update({LABEL_APP: app_id, **(cfg.labels or {}), LABEL_ROLE: str(index)})
    metadata.setdefault("labels", {}).update(labels)
    metadata.setdefault("annotations", {}).update(cfg.annotations or {})
    spec["subdomain"] = app_id
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
        spec.setdefault("tolerations", []).extend(parse_toleration(taint) for taint in cfg.tolerations)
    container = spec["containers"][0]
    container["terminationMessagePath"] = _TERMINATION_LOG
    # A container without a host process, or whose host has not begun (such as an image without Python), writes no
    # termination message; its last log lines then serve as one.
    container["terminationMessagePolicy"] = "FallbackToLogsOnError"
    container["command"] = [_expandable(word) for word in container.get("command", ())]
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


def _variables(request: KubernetesRequest, runs_hosts: bool, hosts: Sequence[str]) -> list[Object]:
    """Return the environment variables of the pods of a role; ``hosts`` are the replicas 0 of all roles."""
    # A variable can refer only to variables before it, and Kubernetes appends its own JOB_COMPLETION_INDEX at the end.
    added: list[Object] = [{"name": _INDEX, "valueFrom": {"fieldRef": {"fieldPath": _INDEX_ANNOTATION}}}]
    added += [{"name": name, "value": host} for name, host in replica0_variables(hosts).items()]
    if runs_hosts:
        # From a Secret, so that descriptions of the pod do not contain the private key.
        reference = {"secretKeyRef": {"name": request.app_id, "key": SECRET_KEY}}
        added.append({"name": CREDENTIALS, "valueFrom": reference})
        added.append({"name": TERMINATION_VARIABLE, "value": _TERMINATION_LOG})
        # The address, not the name: the cluster's DNS knows a pod some seconds after its start.
        added.append({"name": "MONARCH_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}})
        added.append({"name": "MONARCH_HOST_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    return added
