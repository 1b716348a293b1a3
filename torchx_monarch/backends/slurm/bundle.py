# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Derive the configuration of a job's containers from that of an OCI bundle, which is never changed."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchx_monarch.backends.core.errors import UserError

if TYPE_CHECKING:
    from torchx_monarch.backends.slurm.container import Mount

CONFIG = "config.json"
"""Name of the configuration in a bundle's folder."""

ROOT = "rootfs"
"""Name of the root filesystem beside the derived configuration: Slurm (22.05) takes it for no other."""

_PARTS = {"root": dict, "process": dict, "mounts": list, "linux": dict}

_OF_THE_NODE = ("/etc/hosts", "/etc/resolv.conf")
"""Files by which hosts find each other, mounted where the bundle mounts nothing there."""


def read(role: str, image: str) -> dict[str, Any]:
    """Return the configuration of a bundle.

    Args:
        role: name of the role, for messages.
        image: the bundle's folder.

    Raises:
        UserError: there is no bundle, or one that cannot be used.
    """
    path = os.path.join(image, CONFIG)
    advice = "-cfg container=oci needs --image=FOLDER of an OCI bundle (config.json and a root filesystem), which this "
    advice += "machine and all nodes see; `umoci unpack` makes one of an image"
    try:
        with open(path) as file:
            config: Any = json.load(file)
    except OSError as error:
        raise UserError(f"role {role!r}: {path}: {error.strerror}. {advice}") from None
    except ValueError as error:
        raise UserError(f"role {role!r}: {path} is no JSON: {error}") from None
    if not isinstance(config, dict) or not all(
        isinstance(config.get(name, kind()), kind) for name, kind in _PARTS.items()
    ):
        raise UserError(f"role {role!r}: {path} is no configuration of a container. {advice}")
    folder = root(config, image)
    if not os.path.isdir(folder):
        raise UserError(f"role {role!r}: the bundle {image} has no root filesystem: there is no folder {folder}")
    return config


def root(config: Mapping[str, Any], image: str) -> str:
    """Return the path of the root filesystem of the bundle in the folder ``image``."""
    return os.path.join(image, str(config.get("root", {}).get("path", ROOT)))


def derive(config: Mapping[str, Any], mounts: Sequence[Mount]) -> dict[str, Any]:
    """Return the configuration of a job's containers.

    Host name and network are those of the node: by them hosts know themselves and reach each other, and Slurm supports
    no other network. Everything else is as in the bundle, and the mounts are added.

    Args:
        config: the bundle's configuration. It is not changed.
        mounts: the mounts, in the order in which they are made.
    """
    derived = copy.deepcopy(dict(config))
    filesystem = derived.setdefault("root", {})
    filesystem["path"] = ROOT
    derived.pop("hostname", None)
    derived.pop("domainname", None)
    derived.setdefault("process", {})["terminal"] = False
    linux = derived.setdefault("linux", {})
    shared = ("network", "uts")
    linux["namespaces"] = [one for one in linux.get("namespaces") or [] if one.get("type") not in shared]
    made = derived["mounts"] = list(derived.get("mounts") or [])

    def is_mounted(path: str) -> bool:
        return any(f"{path}/".startswith(one["destination"].rstrip("/") + "/") for one in made)

    made += [
        {"destination": path, "type": "bind", "source": path, "options": ["rbind", "ro"]}
        for path in _OF_THE_NODE
        if os.path.exists(path) and not is_mounted(path)
    ]
    if filesystem.get("readonly") and not is_mounted("/tmp"):  # the hosts' sockets are there
        options = ["nosuid", "nodev", "mode=1777"]
        # First, so that it hides no mount of the bundle below /tmp.
        made.insert(0, {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": options})
    for one in mounts:
        if one.device:
            linux.setdefault("devices", []).append({"path": one.target, "fileMode": 0o666, **one.device})
            rules = linux.setdefault("resources", {}).setdefault("devices", [])
            rules.append({"allow": True, "access": one.access, **one.device})
        else:
            options = ["rbind", "ro" if one.read_only else "rw"]
            made.append({"destination": one.target, "type": "bind", "source": one.source, "options": options})
    return derived
