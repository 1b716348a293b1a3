# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Build apps whose roles are Monarch meshes: their hosts wait for actors (``command.actors``) and run no command."""

from __future__ import annotations

import copy
import keyword
from collections.abc import Mapping, Sequence

from torchx.specs import AppDef, Resource, Role

from torchx_monarch.command.actors import actors_command
from torchx_monarch.model import sidecars

_TAKEN = ("query_engine", "query_engine_client", "telemetry_url", "dashboard_url", "admin_url")
"""Attributes of Monarch's JobState, which a mesh of the same name would not be found behind."""


def waiting(app: AppDef, idle_timeout: float, script: Sequence[str] = (), python: str = "python") -> AppDef:
    """A copy of an app whose hosts wait for actors instead of running their commands.

    The app ends with its first role: the hosts of the others are sidecars, for they would wait for ever.

    Args:
        app: stays as it is.
        idle_timeout: seconds without a client until the hosts end; 0 for never.
        script: a python command that runs once, on replica 0 of the first role.
        python: the interpreter, as the replica finds it.

    Raises:
        ValueError: the name of a role cannot be that of a mesh.
    """
    ours = copy.deepcopy(app)
    if not ours.roles:
        raise ValueError(f"the app {app.name!r} has no role, and so no hosts")
    for index, role in enumerate(ours.roles):
        check_mesh_name(role.name)
        words = actors_command(idle_timeout, () if index else script, python)
        role.entrypoint, role.args = words[0], words[1:]
        if index:
            sidecars.mark(role)
    return ours


def app_of_meshes(meshes: Mapping[str, int]) -> AppDef:
    """An app with a role for each mesh: what Monarch's own jobs take, ``{"trainers": 2, "dataloaders": 1}``.

    Raises:
        ValueError: a mesh has no hosts, or its name cannot be one.
    """
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
    """Make sure that ``state().NAME`` can be written.

    Raises:
        ValueError: it cannot.
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(
            f"role {name!r} cannot be a mesh: its hosts are `state().NAME`, and this is no name of Python's. "
            "Give the role a name of letters, digits and underscores."
        )
    if name.startswith("_") or name in _TAKEN:
        raise ValueError(
            f"role {name!r} cannot be a mesh: Monarch's job state has an attribute of that name. Rename it."
        )
