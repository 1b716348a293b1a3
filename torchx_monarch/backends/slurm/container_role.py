# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Decide which container a role's step runs in, from its image and mounts."""

from __future__ import annotations

import os
import re
import stat

import torchx
from torchx.schedulers.devices import get_device_mounts
from torchx.specs import BindMount, DeviceMount, InvalidRunConfigException, Role

from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.backends.slurm import bundle
from torchx_monarch.backends.slurm.container import KINDS, Container, Mount


def of_role(kind: str, role: Role, cwd: str) -> Container:
    """Return the container of a role.

    Args:
        kind: one of ``KINDS``.
        role: the role.
        cwd: the working directory of its replicas, which the container sees.

    Raises:
        UserError: the role has no image that can be used, or a mount that Slurm's containers cannot have.
    """
    if not role.image or role.image.partition(":")[0] == torchx.IMAGE.partition(":")[0]:
        given = f"TorchX's default image, {role.image}, has not" if role.image else "it names none"
        what = "the folder of an OCI bundle" if kind == "oci" else "a name in a registry, or a squashfs file"
        raise UserError(
            f"role {role.name!r} runs in a container (-cfg container={kind}) and needs an image that has "
            f"torchx-monarch, and {given}. Name one with --image: {what}"
        )
    mounts = [_mount(kind, role, each) for each in [*role.mounts, *get_device_mounts(role.resource.devices)]]
    if cwd != "/" and cwd not in [one.target for one in mounts]:
        mounts.append(Mount(cwd, cwd))
    if kind == "oci":
        image = os.path.abspath(role.image)
        return Container(kind, image, cwd, mounts, bundle.read(role.name, image))
    for one in mounts:
        if re.search("[:,]", one.source + one.target):
            raise UserError(
                f"role {role.name!r}: pyxis cannot mount {one.source} at {one.target}: paths must have neither ':' "
                "nor ','"
            )
    return Container(kind, _enroot_name(role), cwd, mounts)


def _enroot_name(role: Role) -> str:
    """Return a role's image as enroot spells it, which separates registry and name by ``#``.

    Raises:
        UserError: it is the path of a file that this machine does not see.
    """
    image: str = role.image
    if image.startswith(("/", "./", "../")):
        path = os.path.abspath(image)
        if not os.path.exists(path):
            raise UserError(
                f"role {role.name!r}: there is no image {path} on this machine. All nodes must see the file; "
                "`enroot import` makes one"
            )
        return path
    registry, slash, name = image.partition("/")
    # Docker's rule for what is a registry.
    if "#" in image or "://" in image or not slash or not (re.search("[.:]", registry) or registry == "localhost"):
        return image
    return f"{registry}#{name}"


def _mount(kind: str, role: Role, mount: object) -> Mount:
    if isinstance(mount, BindMount):
        return Mount(os.path.abspath(mount.src_path), mount.dst_path, mount.read_only)
    if not isinstance(mount, DeviceMount):
        raise UserError(f"role {role.name!r} has a mount of another kind than bind and device: {mount}")
    if kind != "oci":
        return Mount(mount.src_path, mount.dst_path)
    try:
        found = os.stat(mount.src_path)
    except OSError:
        raise UserError(
            f"role {role.name!r}: this machine has no device {mount.src_path}, so its numbers are not known: name it "
            "in the bundle's config.json (linux.devices)"
        ) from None
    letter = "b" if stat.S_ISBLK(found.st_mode) else "c"
    numbers = {"type": letter, "major": os.major(found.st_rdev), "minor": os.minor(found.st_rdev)}
    return Mount(mount.src_path, mount.dst_path, device=numbers, access=mount.permissions)


def check_option(kind: str | None) -> None:
    """Check the run option ``container``.

    Raises:
        InvalidRunConfigException: it is neither None nor one of ``KINDS``.
    """
    if kind is not None and kind not in KINDS:
        reason = f"Run option `container` is {kind!r}; allowed are {' and '.join(KINDS)}"
        raise InvalidRunConfigException(reason, "container", {"container": kind})


def unused(role: Role) -> str:
    """Return a warning about the image or the mounts of a role that has no container; empty if it has neither."""
    image = role.image
    if image and os.path.isfile(os.path.join(image, bundle.CONFIG)):
        return f"role {role.name!r}: {image} is an OCI bundle, and used as a plain folder: -cfg container=oci runs it"
    if image and not os.path.isdir(image) and image.partition(":")[0] != torchx.IMAGE.partition(":")[0]:
        return f"role {role.name!r}: the image {image} is not used: -cfg container=pyxis or oci runs containers"
    if role.mounts:
        return f"role {role.name!r}: its mounts are not used: -cfg container=pyxis or oci runs containers"
    return ""
