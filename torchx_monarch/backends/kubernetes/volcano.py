# SPDX-License-Identifier: BSD-3-Clause
"""Render mode ``volcano``: the job that TorchX's KubernetesScheduler makes for Volcano, with corrections."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence

from torchx.schedulers.kubernetes_scheduler import app_to_resource, sanitize_for_serialization
from torchx.specs import AppDef, RetryPolicy, macros

from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.backends.kubernetes import pods, request
from torchx_monarch.backends.kubernetes.options import KubernetesOpts
from torchx_monarch.backends.kubernetes.request import MAX_LABEL, KubernetesRequest, Object
from torchx_monarch.model.env_names import RANK0_HOST
from torchx_monarch.model.role_spec import RoleSpec


def render(
    app: AppDef, specs: Sequence[RoleSpec], cfg: KubernetesOpts, namespace: str, record: dict[str, str]
) -> KubernetesRequest:
    """Return the request for an app: a Volcano job and the Secret that it owns. Volcano creates the Service."""
    adapted = copy.deepcopy(app)
    adapted.name = request.short_app(app.name)
    for role in adapted.roles:
        # TorchX derives the variable's name from the role's. A shell expands a name with a dash only up to the dash, so
        # replicas get a wrong host name. With several roles, TorchX gives all of them the first role's variable.
        role.args = [word.replace(macros.rank0_env, RANK0_HOST) for word in role.args]
        role.env = {name: value.replace(macros.rank0_env, RANK0_HOST) for name, value in role.env.items()}
        if role.retry_policy is RetryPolicy.ROLE:
            role.retry_policy = RetryPolicy.APPLICATION  # TorchX raises KeyError; Volcano has no policy per role
    sizes = (cfg.reserved_millicpu, cfg.reserved_memmb, cfg.efa_device_count)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchX warns about retries in Volcano 1.4
        resource = app_to_resource(adapted, cfg.queue or "default", cfg.service_account, cfg.priority_class, *sizes)
    job: Object = sanitize_for_serialization(resource)
    app_id = job["metadata"]["name"]
    job["metadata"]["labels"] = {request.LABEL_APP: app_id, **(cfg.labels or {})}
    job["metadata"]["annotations"] = {**record, **(cfg.annotations or {})}
    # Volcano's plugin svc names a pod's host JOB-TASK-0 and its domain like the job.
    replicas = [(index, replica) for index, role in enumerate(adapted.roles) for replica in range(role.num_replicas)]
    hosts = [f"{app_id}-{task['name']}-0" for task in job["spec"]["tasks"]]
    for (index, replica), host in zip(replicas, hosts, strict=True):
        if len(host) > MAX_LABEL:
            raise UserError(
                f"replica {adapted.roles[index].name}/{replica} would be the host {host!r}, which has {len(host)} "
                f"characters, and host names have {MAX_LABEL} at most; give the app or the role a shorter name"
            )
    first_hosts = [f"{host}.{app_id}" for (_, replica), host in zip(replicas, hosts, strict=True) if replica == 0]
    context = pods.PodContext(app_id, namespace, cfg, first_hosts)
    for (index, _), task in zip(replicas, job["spec"]["tasks"], strict=True):
        pods.complete(task["template"], index, specs[index].runs_hosts, context)
    # The job first: it is the record, and the Secret belongs to it from its creation on. A node tries again
    # to start a container whose Secret does not exist yet.
    metadata = {"name": app_id, "labels": dict(job["metadata"]["labels"])}
    return KubernetesRequest("volcano", namespace, app_id, [job, request.secret(metadata)])
