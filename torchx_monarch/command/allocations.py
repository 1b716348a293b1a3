# SPDX-License-Identifier: BSD-3-Clause
"""Turn apps into live allocations, whose hosts wait for runs or for Monarch clients before they execute anything.

An allocation ends with its first role. The others are marked as sidecars, because their hosts would wait forever.
"""

from __future__ import annotations

import keyword
from collections.abc import Mapping, Sequence

from torchx.specs import AppDef, Resource, Role

from torchx_monarch.command.allocation_spec import IDLE_TIMEOUT, script_command
from torchx_monarch.command.command import HOSTS_MODULE, CommandError
from torchx_monarch.command.rank_command import find_rank_command
from torchx_monarch.command.rewrite import insert_words, resolved
from torchx_monarch.model.host_spec import show_seconds
from torchx_monarch.model.role_spec import mark_sidecar

_TAKEN = ("query_engine", "query_engine_client", "telemetry_url", "dashboard_url", "admin_url")
"""Attributes of Monarch's JobState. They would hide a mesh of the same name."""


def hold_for_runs(app: AppDef, idle_timeout: float = IDLE_TIMEOUT) -> AppDef:
    """Return a copy of an app whose hosts wait for runs. A role's rank command becomes the default command of its runs.

    Roles without a rank command do not change.

    Args:
        idle_timeout: seconds without a run after which the hosts end; 0 for never.
    """
    held = resolved(app)
    commands = [(role, find_rank_command(role)) for role in held.roles]
    if not any(found for _, found in commands):
        roles = ", ".join(repr(role.name) for role in held.roles) or "none"
        raise CommandError(f"no role of app {app.name!r} runs a torchrun or Python command; its roles: {roles}")
    for role, found in commands:
        if found is not None and found.command.kind != "hosts":
            insert_words(role, found, [*_hosts_command(idle_timeout), "--"])
    for role in held.roles[1:]:
        mark_sidecar(role)
    return held


def hold_for_clients(app: AppDef, idle_timeout: float, script: Sequence[str] = ()) -> AppDef:
    """Return a copy of an app whose hosts wait for Monarch clients. Its commands are not executed.

    Args:
        idle_timeout: seconds without a client after which the hosts end; 0 for never.
        script: a Python command that runs once, on replica 0 of the first role; empty for no script.
    """
    held = resolved(app)
    if not held.roles:
        raise ValueError(f"the app {app.name!r} has no role, and so no hosts")
    for role in held.roles:
        check_mesh_name(role.name)
        role.entrypoint, *role.args = [*_hosts_command(idle_timeout), "--nproc", "0", "--end-with-mesh"]
    if script:
        held.roles[0].entrypoint, *held.roles[0].args = script_command(script)
    for role in held.roles[1:]:
        mark_sidecar(role)
    return held


def _hosts_command(idle_timeout: float) -> list[str]:
    return ["python", "-m", HOSTS_MODULE, "--idle-timeout", show_seconds(idle_timeout)]


def app_of_meshes(meshes: Mapping[str, int]) -> AppDef:
    """Build an app with a role for each mesh, from the numbers of hosts by name."""
    for mesh, hosts in meshes.items():
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
