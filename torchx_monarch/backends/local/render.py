# SPDX-License-Identifier: BSD-3-Clause
"""Render an AppDef into a request: macros, environments, working folders, GPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence

from torchx.schedulers.ids import make_unique
from torchx.specs import AppDef, Role, macros

from torchx_monarch.backends.local.request import RoleRequest, SupervisorRequest
from torchx_monarch.model.env_names import RANK0_HOST
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.supervisor.replica import ReplicaRequest

#: A folder's name may have 255 bytes; TorchX's random suffix and this package's prefixes need some of them.
_MAX_NAME = 100


def safe_name(name: str) -> str:
    """Return the name of an app, changed and cut as far as a folder, a handle or a container requires."""
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "_-.") else "-" for c in name)
    return safe[:_MAX_NAME].lstrip("-._") or "app"


def render(app: AppDef, specs: Sequence[RoleSpec], *, grace: float) -> SupervisorRequest:
    """Return the request that runs an app."""
    app_id = make_unique(safe_name(app.name))
    roles = [render_role(role, spec, app_id) for role, spec in zip(app.roles, specs, strict=True)]
    return SupervisorRequest(app_id=app_id, name=app.name, roles=roles, grace=float(grace))


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
