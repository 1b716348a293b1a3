# SPDX-License-Identifier: BSD-3-Clause
"""Build apps whose roles are Monarch meshes: allocations without a command, and the script that controls them."""

from __future__ import annotations

import copy
import keyword
from collections.abc import Mapping, Sequence

from torchx.specs import AppDef, Resource, Role

from torchx_monarch.command.allocation_spec import script_command
from torchx_monarch.command.command import HOSTS_MODULE
from torchx_monarch.model.host_spec import show_seconds
from torchx_monarch.model.role_spec import mark_sidecar

_TAKEN = ("query_engine", "query_engine_client", "telemetry_url", "dashboard_url", "admin_url")
"""Attributes of Monarch's JobState. They would hide a mesh of the same name."""


def waiting(app: AppDef, idle_timeout: float, script: Sequence[str] = ()) -> AppDef:
    """Return a copy of an app whose hosts wait for clients instead of executing their commands.

    The app ends with its first role. The other roles are marked as sidecars, because their hosts would wait forever.

    Args:
        idle_timeout: seconds without a client after which the hosts end; 0 for never.
        script: a Python command that runs once, on replica 0 of the first role; empty for no script.
    """
    ours = copy.deepcopy(app)
    if not ours.roles:
        raise ValueError(f"the app {app.name!r} has no role, and so no hosts")
    idle = show_seconds(idle_timeout)
    hosts = ["python", "-m", HOSTS_MODULE, "--idle-timeout", idle, *("--nproc", "0", "--end-with-mesh")]
    for index, role in enumerate(ours.roles):
        check_mesh_name(role.name)
        role.entrypoint, *role.args = script_command(script) if script and not index else hosts
        if index:
            mark_sidecar(role)
    return ours


def app_of_meshes(meshes: Mapping[str, int]) -> AppDef:
    """Build an app with a role for each mesh, from the numbers of hosts by name."""
    for mesh, hosts in meshes.items():
        check_mesh_name(mesh)
        if not isinstance(hosts, int) or hosts < 1:
            raise ValueError(f"mesh {mesh!r} is to have {hosts!r} hosts; it needs 1 or more")
    small = Resource(cpu=1, gpu=0, memMB=1024)
    roles = [
        Role(mesh, image="", entrypoint="python", num_replicas=hosts, resource=small) for mesh, hosts in meshes.items()
    ]
    return AppDef("monarch", roles)


def check_mesh_name(name: str) -> None:
    """Check that a mesh of this name can be accessed as ``state().NAME``; raise ``ValueError`` if not."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(
            f"role {name!r} cannot be a mesh: its hosts are `state().NAME`, and this is no name of Python's. "
            "Give the role a name of letters, digits and underscores."
        )
    if name.startswith("_") or name in _TAKEN:
        raise ValueError(
            f"role {name!r} cannot be a mesh: Monarch's job state has an attribute of that name. Rename it."
        )
