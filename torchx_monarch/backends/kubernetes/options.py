# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The run options of the Kubernetes scheduler; names are those of TorchX's own where it has them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torchx.schedulers.api import StructuredOpts
from torchx.schedulers.kubernetes_scheduler import RESERVED_MEMMB, RESERVED_MILLICPU
from torchx.specs import InvalidRunConfigException

from torchx_monarch.backends.kubernetes import names

MODES = ("auto", "job", "volcano")


@dataclass
class KubernetesOpts(StructuredOpts):  # type: ignore[misc]
    """Run options of the Kubernetes scheduler."""

    mode: str = "auto"
    """`job` needs nothing but Kubernetes (1.29 or later): an Indexed Job for each role. `volcano` submits a job of
    Volcano's. `auto` is `volcano` where the cluster knows Volcano's jobs."""

    namespace: str | None = None
    """The namespace. Default: that of the kubeconfig's context."""

    queue: str | None = None
    """With `mode=volcano`: Volcano's queue. Default: `default`."""

    kueue_queue: str | None = None
    """With `mode=job`: the Kueue LocalQueue that admits the job; the label `kueue.x-k8s.io/queue-name`."""

    kueue_priority: str | None = None
    """With `mode=job`: Kueue's WorkloadPriorityClass; the label `kueue.x-k8s.io/priority-class`."""

    service_account: str | None = None
    """The pods' service account."""

    priority_class: str | None = None
    """The pods' PriorityClass."""

    image_secret: str | None = None
    """The Secret of the namespace with which images are pulled."""

    node_selector: dict[str, str] | None = None
    """Labels that nodes must have: `node_selector=disk:ssd`. Capabilities of a role's resource whose name is that of a
    node's label (`node.kubernetes.io/instance-type`) are required as well."""

    labels: dict[str, str] | None = None
    """Further labels of all objects."""

    annotations: dict[str, str] | None = None
    """Further annotations of jobs and pods."""

    ttl_seconds_after_finished: int | None = None
    """With `mode=job`: seconds after the end of the app's last role until Kubernetes deletes all of it. Default:
    never."""

    pull_timeout: int = 300
    """Seconds that a pod may fail to start for want of its image or of what its container refers to; the app then
    fails."""

    validate_spec: bool = True
    """Have the API server check the request (a dry run of its own) before anything is submitted."""

    reserved_millicpu: int = RESERVED_MILLICPU
    """CPU in millicores by which requests stay below what a role asks for, for what else runs on a node."""

    reserved_memmb: int = RESERVED_MEMMB
    """Memory in MB by which requests stay below what a role asks for."""

    efa_device_count: int | None = None
    """EFA devices of each pod in place of those of the role's resource."""

    grace: int = 30
    """Seconds that a replica has between SIGTERM and SIGKILL."""


def check(cfg: KubernetesOpts) -> None:
    """Refuse what makes no sense.

    Raises:
        InvalidRunConfigException: the message names the option, its value and what is allowed.
    """
    options = {field.name: cfg[field.name] for field in fields(cfg) if not field.name.startswith("_")}

    def refuse(name: str, allowed: str) -> None:
        reason = f"Run option `{name}` is {options[name]!r}; {allowed}"
        raise InvalidRunConfigException(reason, name, options)

    if cfg.mode not in MODES:
        refuse("mode", f"allowed are {', '.join(MODES)}")
    if cfg.namespace is not None and not names.is_namespace(cfg.namespace):
        refuse("namespace", "a namespace is called by up to 63 lower-case letters, digits and dashes")
    for name in ("grace", "pull_timeout", "ttl_seconds_after_finished", "reserved_millicpu", "reserved_memmb"):
        if (options[name] or 0) < 0:
            refuse(name, "allowed is 0 or more")
    only = {"volcano": ("kueue_queue", "kueue_priority", "ttl_seconds_after_finished"), "job": ("queue",)}
    for name in only.get(cfg.mode, ()):
        if options[name] is not None:
            other = "job" if cfg.mode == "volcano" else "volcano"
            refuse(name, f"it is for mode={other}, and the mode is {cfg.mode}")
