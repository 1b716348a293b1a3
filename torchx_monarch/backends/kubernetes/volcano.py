# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Mode ``volcano``: the job that TorchX's KubernetesScheduler makes for Volcano, mended."""

from __future__ import annotations

import copy
import warnings

from torchx.schedulers.kubernetes_scheduler import app_to_resource, sanitize_for_serialization
from torchx.specs import AppDef, RetryPolicy, macros

from torchx_monarch.backends.kubernetes import jobs, names, pods
from torchx_monarch.backends.kubernetes.options import KubernetesOpts
from torchx_monarch.backends.kubernetes.request import KubernetesRequest, Object


def render(app: AppDef, cfg: KubernetesOpts, namespace: str, record: dict[str, str]) -> KubernetesRequest:
    """The objects of an app: a Secret and Volcano's job, which makes the Service itself.

    Args:
        app: as it is to run.
        cfg: the run options.
        namespace: where.
        record: the annotations of the app's record, which is the job.

    Raises:
        ValueError: a name has too many characters.
    """
    theirs = copy.deepcopy(app)
    theirs.name = names.short_app(app.name)
    for role in theirs.roles:
        # Upstream names a variable after the role, and no shell takes one with a dash in it for a variable: the others
        # then look for replica 0 under a piece of the name. And of several roles all get the first one's.
        role.args = [word.replace(macros.rank0_env, pods.RANK0) for word in role.args]
        role.env = {name: value.replace(macros.rank0_env, pods.RANK0) for name, value in role.env.items()}
        if role.retry_policy is RetryPolicy.ROLE:
            role.retry_policy = RetryPolicy.APPLICATION  # upstream ends with a KeyError; Volcano has nothing between
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of retries in Volcano 1.4
        resource = app_to_resource(
            theirs,
            cfg.queue or "default",
            cfg.service_account,
            cfg.priority_class,
            cfg.reserved_millicpu,
            cfg.reserved_memmb,
            cfg.efa_device_count,
        )
    job: Object = sanitize_for_serialization(resource)
    app_id = job["metadata"]["name"]
    job["metadata"]["labels"] = {names.LABEL_APP: app_id, **(cfg.labels or {})}
    job["metadata"]["annotations"] = {**record, **(cfg.annotations or {})}
    # Volcano's plugin svc: a pod's host name is JOB-TASK-0, and the domain is called as the job.
    tasks, hosts = iter(job["spec"]["tasks"]), list[str]()
    placed: list[tuple[int, Object]] = []
    for index, role in enumerate(theirs.roles):
        for replica in range(role.num_replicas):
            task = next(tasks)
            placed.append((index, task))
            host = f"{app_id}-{task['name']}-0"
            names.check_host_name(host, f"replica {role.name}/{replica}")
            if replica == 0:
                hosts.append(f"{host}.{app_id}")
    for index, task in placed:
        pods.finish(task["template"], app_id, namespace, cfg, pods.where(hosts))
        task["template"]["metadata"]["labels"][names.LABEL_ROLE] = str(index)
    return KubernetesRequest("volcano", namespace, app_id, [jobs.secret(app_id, cfg), job])
