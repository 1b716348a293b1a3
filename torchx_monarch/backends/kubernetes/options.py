# SPDX-License-Identifier: BSD-3-Clause
"""The run options of the Kubernetes scheduler. Options that TorchX's scheduler has too keep its names."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torchx.specs import InvalidRunConfigException

from torchx_monarch.backends.core.options import NetworkOpts
from torchx_monarch.backends.kubernetes.request import Object, is_namespace

_TAINT = re.compile(r"(?P<key>[^=:\s]+)(=(?P<value>[^=:\s]*))?(:(?P<effect>\w+))?")


@dataclass
class KubernetesOpts(NetworkOpts):
    """Run options of monarch_kubernetes."""

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


def check(cfg: KubernetesOpts) -> None:
    """Check the run options that are Kubernetes' own."""

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
