# SPDX-License-Identifier: BSD-3-Clause
"""Render the roles of an AppDef as what a supervisor runs."""

from __future__ import annotations

import os

from torchx.specs import Role

from torchx_monarch.backends.local.request import RoleRequest
from torchx_monarch.model.role_spec import RoleSpec

#: A folder's name may have 255 bytes; TorchX's random suffix and this package's prefixes need some of them.
_MAX_NAME = 100


def safe_name(name: str) -> str:
    """Return the name of an app, changed and cut as far as a folder, a handle or a container requires."""
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "_-.") else "-" for c in name)
    return safe[:_MAX_NAME].lstrip("-._") or "app"


def working_folder(role: Role) -> str:
    """Return the folder in which a role's commands run: its image if that is a folder, as TorchX does."""
    return os.path.abspath(role.image) if role.image and os.path.isdir(role.image) else os.getcwd()


def role_request(role: Role, spec: RoleSpec, image: str | None = None) -> RoleRequest:
    """Return the request of a role; ``image``: what TorchX's macro ``img_root`` means, None for the working folder."""
    cwd = working_folder(role)
    words = [role.entrypoint, *role.args]
    return RoleRequest(spec, words, dict(role.env), cwd, cwd if image is None else image)
