# SPDX-License-Identifier: BSD-3-Clause
"""An app as submitted, and its JSON form: what backends store, so that ``describe`` shows what the user wrote."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from torchx.specs import AppDef, BindMount, DeviceMount, Resource, RetryPolicy, Role, VolumeMount, Workspace

from torchx_monarch.backends.core import state_files
from torchx_monarch.model import codec
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.system import safe_files
from torchx_monarch.system.untrusted_text import one_line

_MOUNTS: dict[str, Any] = {"bind": BindMount, "volume": VolumeMount, "device": DeviceMount}

T = TypeVar("T")


@dataclass(frozen=True)
class SubmittedApp:
    """An app as submitted.

    Attributes:
        app: the app as the user wrote it.
        roles: what backends must know of each role, in the order of the app.
    """

    app: AppDef
    roles: Sequence[RoleSpec]

    def to_json(self) -> dict[str, Any]:
        """Return the app as JSON values.

        In TorchX, metadata, and tags and capabilities of resources, may hold any object. Objects that JSON does not
        support become their ``str`` when the result is written. Overrides of a role are resolved.
        """
        roles = [_role_to_json(role) for role in self.app.roles]
        app = {"name": self.app.name, "metadata": dict(self.app.metadata), "roles": roles}
        return {"app": app, "roles": [asdict(role) for role in self.roles]}

    @classmethod
    def from_json(cls, data: Any, source: str = "the stored app") -> SubmittedApp:
        """Build an app from the output of ``to_json``; ignore fields that this version of TorchX does not know.

        Raises:
            DamagedFileError: the data is no app; ``source`` says in the message where it was.
        """
        try:
            specs = codec.decode(list[RoleSpec], data["roles"])
            roles = [_role_from_json(role) for role in data["app"]["roles"]]
            app = AppDef(data["app"]["name"], roles, data["app"].get("metadata", {}))
            if [spec.name for spec in specs] != [role.name for role in roles]:
                raise ValueError("its roles have other names than their specs")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise state_files.DamagedFileError(f"{source} is damaged: {error!r}") from None
        return cls(app, specs)

    @classmethod
    def load(cls, path: str, below: str | None = None) -> SubmittedApp | None:
        """Read app.json; return None if it does not exist; arguments and errors as for ``state_files.load``."""
        stored = state_files.load(dict[str, Any], path, below)
        return None if stored is None else cls.from_json(stored, one_line(path))

    def pack(self) -> str:
        """Encode the app as one word of text, for labels, comments and annotations.

        The word is base64 of compressed JSON; environments and arguments are repetitive and compress well.
        """
        text = json.dumps(self.to_json(), default=str, separators=(",", ":"))
        return base64.b64encode(zlib.compress(text.encode(), 9)).decode()

    @classmethod
    def unpack(cls, word: str, source: str = "the stored app") -> SubmittedApp:
        """Decode the output of ``pack``."""
        try:
            data = safe_files.parse_json(zlib.decompress(base64.b64decode(word, validate=True)))
        except (zlib.error, ValueError) as error:  # binascii.Error is a ValueError
            raise state_files.DamagedFileError(f"{source} is damaged: {error}") from None
        return cls.from_json(data, source)


def _role_to_json(role: Role) -> dict[str, Any]:
    # Read attribute by attribute: a role resolves an override only when its attribute is read.
    data = {field.name: getattr(role, field.name) for field in fields(Role) if field.name != "overrides"}
    data["retry_policy"] = RetryPolicy(role.retry_policy).value
    data["resource"] = asdict(role.resource)
    kinds = [next(kind for kind, cls in _MOUNTS.items() if isinstance(mount, cls)) for mount in role.mounts]
    data["mounts"] = [{"type": kind, **asdict(mount)} for kind, mount in zip(kinds, role.mounts, strict=True)]
    data["workspace"] = None if role.workspace is None else dict(role.workspace.projects)
    return data


def _role_from_json(data: dict[str, Any]) -> Role:
    data = dict(data)
    data["retry_policy"] = RetryPolicy(data.get("retry_policy", RetryPolicy.APPLICATION))
    if "resource" in data:
        data["resource"] = _known(Resource, data["resource"])
    data["mounts"] = [_known(_MOUNTS[mount["type"]], mount) for mount in data.get("mounts", ())]
    if data.get("workspace") is not None:
        data["workspace"] = Workspace(projects=data["workspace"])
    return _known(Role, data)


def _known(cls: type[T], data: dict[str, Any]) -> T:
    """Build an object from the fields that this version of TorchX knows."""
    names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in data.items() if name in names})
