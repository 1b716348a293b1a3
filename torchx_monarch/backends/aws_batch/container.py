# SPDX-License-Identifier: BSD-3-Clause
"""Render Batch's container properties of a role: resources, devices, mounts, environment."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from torchx.schedulers.devices import get_device_mounts
from torchx.specs import BindMount, DeviceMount, Resource, Role, VolumeMount, macros
from torchx.specs.named_resources_aws import K8S_ITYPE

from torchx_monarch.backends.aws_batch.options import AWSBatchOpts
from torchx_monarch.backends.core.errors import UserError

_PERMISSIONS = {"r": "READ", "w": "WRITE", "m": "MKNOD"}

_LOWEST_MEMORY = 4
"""Smallest memory of a container that Batch accepts, in MiB."""

RANK0 = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"
"""Batch's variable with the address of the main node (replica 0 of the first role); Batch leaves it unset there."""

REPLICA = "TORCHX_REPLICA_ID"
"""The shell variable that holds the replica number."""

_UNKNOWN = "\0"
"""Placeholder for the replica number. No argument and no environment variable can contain a null character."""


def properties(role: Role, command: list[str], env: Mapping[str, str], cfg: AWSBatchOpts) -> dict[str, Any]:
    """Return the container properties of all nodes of a role.

    Raises:
        UserError: Batch cannot provide a resource or mount of the role, or a ulimit is malformed.
    """
    volumes, points, devices = _mounts(role)
    found: dict[str, Any] = {
        "image": role.image,
        "command": command,
        "environment": [{"name": name, "value": value} for name, value in env.items()],
        "privileged": cfg.privileged,
        "resourceRequirements": _requirements(role),
        "linuxParameters": {
            # The kernel discards signals, SIGTERM among them, that process 1 of a container has no handler for.
            "initProcessEnabled": True,
            # Data loaders need more than 64 MB of shared memory, the usual size in a container.
            "sharedMemorySize": role.resource.memMB,
            "devices": devices,
        },
        "logConfiguration": {
            "logDriver": "awslogs",
            **({"options": {"awslogs-group": cfg.log_group}} if cfg.log_group else {}),
        },
        "volumes": volumes,
        "mountPoints": points,
    }
    limits = ulimits(cfg.ulimits or [])
    if limits:
        found["ulimits"] = limits
    if cfg.job_role_arn:
        found["jobRoleArn"] = cfg.job_role_arn
    if cfg.execution_role_arn:
        found["executionRoleArn"] = cfg.execution_role_arn
    return found


def instance_type(resource: Resource) -> str | None:
    """Return the instance type of a named resource (``aws_p4d.24xlarge``); None for other resources."""
    found = resource.capabilities.get(K8S_ITYPE)
    return str(found) if found else None


def _requirements(role: Role) -> list[dict[str, str]]:
    resource = role.resource
    if resource.memMB < _LOWEST_MEMORY:
        raise UserError(
            f"role {role.name!r} asks for {resource.memMB} MB of memory; AWS Batch must be told how much, "
            f"{_LOWEST_MEMORY} MB or more (memMB, or a named resource)"
        )
    found = [
        {"type": "VCPU", "value": str(max(1, resource.cpu))},
        {"type": "MEMORY", "value": str(resource.memMB)},
    ]
    if resource.gpu > 0:
        found.append({"type": "GPU", "value": str(resource.gpu)})
    return found


def _mounts(role: Role) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the volumes, mount points and devices of a role, including the devices of its resource."""
    volumes: list[dict[str, Any]] = []
    points, devices = [], []
    for index, mount in enumerate([*role.mounts, *get_device_mounts(role.resource.devices)]):
        if isinstance(mount, DeviceMount):
            unknown = set(mount.permissions) - set(_PERMISSIONS)
            if unknown:
                raise UserError(
                    f"role {role.name!r}: permissions {mount.permissions!r} of {mount.src_path}: r, w and m are known"
                )
            devices.append(
                {
                    "hostPath": mount.src_path,
                    "containerPath": mount.dst_path,
                    "permissions": [_PERMISSIONS[letter] for letter in mount.permissions],
                }
            )
            continue
        name = f"mount_{index}"
        if isinstance(mount, BindMount):
            volumes.append({"name": name, "host": {"sourcePath": mount.src_path}})
        elif isinstance(mount, VolumeMount):
            volumes.append({"name": name, "efsVolumeConfiguration": _efs(mount.src)})
        else:
            raise UserError(
                f"role {role.name!r} has a mount of another kind than bind, volume (EFS) and device: {mount}"
            )
        points.append({"sourceVolume": name, "containerPath": mount.dst_path, "readOnly": mount.read_only})
    return volumes, points, devices


def _efs(source: str) -> dict[str, str]:
    """Convert ``fs-12345678``, or ``fs-12345678:/folder`` for one of its folders, to an EFS volume configuration."""
    system, _, folder = source.partition(":")
    return {"fileSystemId": system, **({"rootDirectory": folder} if folder else {})}


def ulimits(texts: list[str]) -> list[dict[str, Any]]:
    """Parse ulimits of the form NAME:SOFT:HARD; empty texts are skipped.

    Raises:
        UserError: a text has another form.
    """
    found = []
    for text in filter(None, (ulimit.strip() for ulimit in texts)):
        parts = text.split(":")
        try:
            name, soft, hard = parts[0], int(parts[1]), int(parts[2])
            if len(parts) != 3 or not name:
                raise ValueError
        except (IndexError, ValueError):
            raise UserError(f"run option ulimits: {text!r} is not NAME:SOFT:HARD, such as memlock:-1:-1") from None
        found.append({"name": name, "softLimit": soft, "hardLimit": hard})
    return found


def render_command(role: Role, app_id: str, first: int) -> tuple[list[str], dict[str, str]]:
    """Return the words of a role's command, and its environment.

    Args:
        first: node index of the role's replica 0.

    Raises:
        UserError: a variable's name is reserved by Batch, or no shell can set it though its value uses the replica
            number.
    """
    is_single = role.num_replicas == 1
    values = macros.Values(img_root="", app_id=app_id, replica_id="0" if is_single else _UNKNOWN, rank0_env=RANK0)
    filled = values.apply(role)
    words, env = [filled.entrypoint, *filled.args], dict(filled.env)
    for name in env:
        if name.startswith("AWS_BATCH"):
            raise UserError(
                f"role {role.name!r} sets {name}; AWS Batch keeps names that begin with AWS_BATCH for itself"
            )
    late = {name: value for name, value in env.items() if _UNKNOWN in value}
    if not late and not any(_UNKNOWN in word for word in words):
        return words, env
    lines = [f"{REPLICA}=$((${{AWS_BATCH_JOB_NODE_INDEX:-{first}}} - {first}))"]
    for name, value in late.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise UserError(
                f"role {role.name!r}: the value of {name!r} holds ${{replica_id}}, and a shell cannot set that name"
            )
        lines.append(f"export {name}={_quoted(value)}")
        del env[name]
    lines.append("exec " + " ".join(map(_quoted, words)))
    return ["sh", "-c", "\n".join(lines)], env


def _quoted(text: str) -> str:
    """Quote a text as one shell word, with the placeholder replaced by the shell variable."""
    return f'"${REPLICA}"'.join(shlex.quote(part) if part else "" for part in text.split(_UNKNOWN)) or "''"
