# SPDX-License-Identifier: BSD-3-Clause
"""Render an AppDef into a request: macros, environments, working folders, GPUs."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence

from torchx.schedulers.ids import make_unique
from torchx.specs import AppDef, Role, macros

from torchx_monarch.backends.local import gpus
from torchx_monarch.backends.local.request import LocalRequest, RoleRequest
from torchx_monarch.model.env_names import RANK0_HOST
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.supervisor.replica import ReplicaRequest

#: A folder's name may have 255 bytes; TorchX's random suffix and this package's prefixes need some of them.
_MAX_NAME = 100

_log = logging.getLogger("torchx_monarch")


def safe_name(name: str) -> str:
    """Return the name of an app, changed and cut as far as a folder, a handle or a container requires."""
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "_-.") else "-" for c in name)
    return safe[:_MAX_NAME].lstrip("-._") or "app"


def new_app_id(name: str) -> str:
    """Return an id for an app of this name: the safe name and a random suffix."""
    app_id: str = make_unique(safe_name(name))
    return app_id


def render(
    app: AppDef,
    specs: Sequence[RoleSpec],
    *,
    grace: float,
    assign_gpus: bool,
    environ: Mapping[str, str],
    lease: float = 30.0,
) -> LocalRequest:
    """Return the request that runs an app; ``assign_gpus`` divides this machine's GPUs between its replicas."""
    app_id = new_app_id(app.name)
    roles = [render_role(role, spec, app_id) for role, spec in zip(app.roles, specs, strict=True)]
    _give_gpus(app, roles, assign_gpus, environ)
    return LocalRequest(app_id=app_id, name=app.name, roles=roles, grace=float(grace), lease=float(lease))


def working_folder(role: Role) -> str:
    """Return the folder in which a role's commands run: its image if that is a folder, as TorchX does."""
    return os.path.abspath(role.image) if role.image and os.path.isdir(role.image) else os.getcwd()


def render_role(role: Role, spec: RoleSpec, app_id: str, root: str = "") -> RoleRequest:
    """Return the request of a role; ``root`` is what TorchX's macro ``img_root`` means, if not the working folder."""
    cwd = working_folder(role)
    replicas = []
    for replica in range(role.num_replicas):
        filled = macros.Values(root or cwd, app_id, str(replica), RANK0_HOST).apply(role)
        replicas.append(ReplicaRequest(args=[filled.entrypoint, *filled.args], env=dict(filled.env), cwd=cwd))
    return RoleRequest(spec, replicas)


def _give_gpus(app: AppDef, roles: list[RoleRequest], assign_gpus: bool, environ: Mapping[str, str]) -> None:
    """Divide the GPUs between the replicas, in the order of roles and replicas; warn where that is not done."""
    counts = [max(0, role.resource.gpu) for role in app.roles for _ in range(role.num_replicas)]
    if not any(counts):
        return
    if not assign_gpus:
        if sum(map(bool, counts)) > 1:
            _log.warning(
                "several replicas of this app ask for GPUs, and all of them will see all GPUs of this machine. "
                "Set the run option auto_set_cuda_visible_devices=True to divide the GPUs between them."
            )
        return
    available = gpus.devices(environ)
    assigned = gpus.assign(counts, available)
    if not assigned:
        _log.warning(
            "CUDA_VISIBLE_DEVICES is not set for this app: it asks for %d GPUs, and this machine has %d.",
            sum(counts),
            len(available),
        )
    for replica, devices in zip((replica for role in roles for replica in role.replicas), assigned, strict=False):
        if devices:
            replica.env[gpus.CUDA_VISIBLE_DEVICES] = ",".join(devices)
