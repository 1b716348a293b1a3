# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""AppDef <-> JSON: what app.json keeps, so that ``torchx describe`` gives back what was submitted."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any, TypeVar

from torchx.specs import AppDef, BindMount, DeviceMount, Resource, RetryPolicy, Role, VolumeMount, Workspace

_MOUNTS: dict[str, Any] = {"bind": BindMount, "volume": VolumeMount, "device": DeviceMount}

T = TypeVar("T")


def to_json(app: AppDef) -> dict[str, Any]:
    """The app as JSON can hold it.

    Metadata, and tags and capabilities of resources, may hold any object in TorchX: what JSON does not know is kept as
    its ``str`` when the result is written. Overrides of a role are resolved.
    """
    return {"name": app.name, "metadata": dict(app.metadata), "roles": [_role_to_json(role) for role in app.roles]}


def from_json(data: dict[str, Any]) -> AppDef:
    """The app that ``to_json`` was given. Fields this version of TorchX does not know are left out."""
    return AppDef(
        name=data["name"], metadata=dict(data.get("metadata", {})), roles=[_role_from_json(r) for r in data["roles"]]
    )


def _role_to_json(role: Role) -> dict[str, Any]:
    # Read attribute by attribute: a role gives an override's value only to one who asks for the attribute.
    data = {field.name: getattr(role, field.name) for field in fields(Role) if field.name != "overrides"}
    data["retry_policy"] = RetryPolicy(role.retry_policy).value
    data["resource"] = asdict(role.resource)
    data["mounts"] = [_mount_to_json(mount) for mount in role.mounts]
    data["workspace"] = None if role.workspace is None else dict(role.workspace.projects)
    return data


def _role_from_json(data: dict[str, Any]) -> Role:
    data = dict(data)
    data["retry_policy"] = RetryPolicy(data.get("retry_policy", RetryPolicy.APPLICATION))
    if "resource" in data:
        data["resource"] = _known(Resource, data["resource"])
    data["mounts"] = [_mount_from_json(mount) for mount in data.get("mounts", ())]
    if data.get("workspace") is not None:
        data["workspace"] = Workspace(projects=data["workspace"])
    return _known(Role, data)


def _mount_to_json(mount: BindMount | VolumeMount | DeviceMount) -> dict[str, Any]:
    kind = next(kind for kind, cls in _MOUNTS.items() if isinstance(mount, cls))
    return {"type": kind, **asdict(mount)}


def _mount_from_json(data: dict[str, Any]) -> BindMount | VolumeMount | DeviceMount:
    mount: BindMount | VolumeMount | DeviceMount = _known(_MOUNTS[data["type"]], data)
    return mount


def _known(cls: type[T], data: dict[str, Any]) -> T:
    names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in data.items() if name in names})
