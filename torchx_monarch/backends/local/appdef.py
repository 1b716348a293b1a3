# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Convert an AppDef to JSON and back: app.json keeps it, so that ``torchx describe`` returns what was submitted."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from torchx.specs import AppDef, BindMount, DeviceMount, Resource, RetryPolicy, Role, VolumeMount, Workspace

from torchx_monarch.backends.local import state_files
from torchx_monarch.model import codec

_MOUNTS: dict[str, Any] = {"bind": BindMount, "volume": VolumeMount, "device": DeviceMount}

T = TypeVar("T")


def to_json(app: AppDef) -> dict[str, Any]:
    """Return the app as JSON values.

    In TorchX, metadata, and tags and capabilities of resources, may hold any object. Objects that JSON does not support
    become their ``str`` when the result is written. Overrides of a role are resolved.
    """
    return {"name": app.name, "metadata": dict(app.metadata), "roles": [_role_to_json(role) for role in app.roles]}


@dataclass
class _Essential:
    """The fields of a role that this package reads, with the types on which it relies."""

    name: str
    image: str
    entrypoint: str = ""
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    num_replicas: int = 1
    max_retries: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class Submitted:
    """The content of app.json.

    Attributes:
        app: the app as submitted.
        cfg: the run options.
    """

    app: AppDef
    cfg: dict[str, Any]


def load(path: str, below: str | None = None) -> Submitted | None:
    """Read app.json; return None if the file is missing or damaged.

    Args:
        path: path of app.json.
        below: as for ``state_files.read_json``.
    """
    data = state_files.read_json(path, below)
    cfg = data.get("cfg") if data else None
    try:
        return Submitted(from_json(data["app"]), cfg if isinstance(cfg, dict) else {}) if data else None
    except (KeyError, ValueError):
        return None


def from_json(data: Any) -> AppDef:
    """Build an app from the output of ``to_json``; ignore fields that this version of TorchX does not know.

    Raises:
        ValueError: the data is no app.
    """
    try:
        for role in data["roles"]:
            codec.decode(_Essential, role)
        metadata = codec.decode(dict[str, Any], data.get("metadata", {}))
        roles = [_role_from_json(role) for role in data["roles"]]
        return AppDef(codec.decode(str, data["name"]), roles, metadata)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this is no app: {error!r}") from None


def _role_to_json(role: Role) -> dict[str, Any]:
    # Read attribute by attribute: a role resolves an override only when its attribute is read.
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
