# SPDX-License-Identifier: BSD-3-Clause
"""Render Batch's container properties of a role: command, resources, devices, mounts, environment."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from torchx.schedulers.devices import get_device_mounts
from torchx.specs import BindMount, DeviceMount, Role, VolumeMount, macros

from torchx_monarch.backends.aws_batch.options import AWSBatchOpts
from torchx_monarch.backends.core.errors import UserError

_PERMISSIONS = {"r": "READ", "w": "WRITE", "m": "MKNOD"}

_MIN_MEMORY = 4
"""Smallest memory of a container that Batch accepts, in MiB."""

RANK0 = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"
"""Batch's variable with the address of the main node (replica 0 of the first role); Batch leaves it unset there."""

_REPLICA = "TORCHX_REPLICA_ID"
"""The shell variable that holds the replica number."""

_UNKNOWN = "\0"
"""Placeholder for the replica number. No argument and no environment variable can contain a null character."""


def properties(role: Role, command: list[str], env: Mapping[str, str], cfg: AWSBatchOpts) -> dict[str, Any]:
    """Return the container properties of all nodes of a role."""
    memory = role.resource.memMB
    if memory < _MIN_MEMORY:
        raise UserError(
            f"role {role.name!r} asks for {memory} MB of memory; AWS Batch must be told how much, {_MIN_MEMORY} MB or "
            "more (memMB, or a named resource)"
        )
    amounts = {"VCPU": max(1, role.resource.cpu), "MEMORY": memory, "GPU": max(0, role.resource.gpu)}
    mounts = [*role.mounts, *get_device_mounts(role.resource.devices)]
    storage = [(f"mount_{index}", mount) for index, mount in enumerate(mounts) if not isinstance(mount, DeviceMount)]
    optional = {
        "ulimits": ulimits(cfg.ulimits or []),
        "jobRoleArn": cfg.job_role_arn,
        "executionRoleArn": cfg.execution_role_arn,
    }
    return {
        "image": role.image,
        "command": command,
        "environment": [{"name": name, "value": value} for name, value in env.items()],
        "privileged": cfg.privileged,
        "resourceRequirements": [{"type": kind, "value": str(amount)} for kind, amount in amounts.items() if amount],
        "linuxParameters": {
            # The kernel discards signals, SIGTERM among them, that process 1 of a container has no handler for.
            "initProcessEnabled": True,
            # Data loaders need more than 64 MB of shared memory, the usual size in a container.
            "sharedMemorySize": memory,
            "devices": [_device(role, mount) for mount in mounts if isinstance(mount, DeviceMount)],
        },
        "logConfiguration": {
            "logDriver": "awslogs",
            **({"options": {"awslogs-group": cfg.log_group}} if cfg.log_group else {}),
        },
        "volumes": [{"name": name, **_volume(mount)} for name, mount in storage],
        "mountPoints": [
            {"sourceVolume": name, "containerPath": mount.dst_path, "readOnly": mount.read_only}
            for name, mount in storage
        ],
        **{name: value for name, value in optional.items() if value},
    }


def _device(role: Role, mount: DeviceMount) -> dict[str, Any]:
    if set(mount.permissions) - set(_PERMISSIONS):
        raise UserError(
            f"role {role.name!r}: permissions {mount.permissions!r} of {mount.src_path}: r, w and m are known"
        )
    permissions = [_PERMISSIONS[letter] for letter in mount.permissions]
    return {"hostPath": mount.src_path, "containerPath": mount.dst_path, "permissions": permissions}


def _volume(mount: BindMount | VolumeMount) -> dict[str, Any]:
    """Return a volume: a host's folder, or an EFS file system (``fs-12345678``, ``fs-12345678:/folder``)."""
    if isinstance(mount, BindMount):
        return {"host": {"sourcePath": mount.src_path}}
    system, _, folder = mount.src.partition(":")
    return {"efsVolumeConfiguration": {"fileSystemId": system, **({"rootDirectory": folder} if folder else {})}}


def ulimits(texts: list[str]) -> list[dict[str, Any]]:
    """Parse ulimits of the form NAME:SOFT:HARD; empty texts are skipped."""
    limits = []
    for text in filter(None, (ulimit.strip() for ulimit in texts)):
        found = re.fullmatch(r"([^:]+):(-?\d+):(-?\d+)", text)
        if found is None:
            raise UserError(f"run option ulimits: {text!r} is not NAME:SOFT:HARD, such as memlock:-1:-1")
        limits.append({"name": found[1], "softLimit": int(found[2]), "hardLimit": int(found[3])})
    return limits


def render_command(role: Role, app_id: str, first: int) -> tuple[list[str], dict[str, str]]:
    """Return the words of a role's command, and its environment.

    Args:
        first: node index of the role's replica 0.
    """
    number = "0" if role.num_replicas == 1 else _UNKNOWN
    applied = macros.Values(img_root="", app_id=app_id, replica_id=number, rank0_env=RANK0).apply(role)
    words, env = [applied.entrypoint, *applied.args], dict(applied.env)
    for name in env:
        if name.startswith("AWS_BATCH"):
            raise UserError(
                f"role {role.name!r} sets {name}; AWS Batch keeps names that begin with AWS_BATCH for itself"
            )
    late = {name: value for name, value in env.items() if _UNKNOWN in value}
    if not late and not any(_UNKNOWN in word for word in words):
        return words, env
    lines = [f"{_REPLICA}=$((${{AWS_BATCH_JOB_NODE_INDEX:-{first}}} - {first}))"]
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
    return f'"${_REPLICA}"'.join(shlex.quote(part) if part else "" for part in text.split(_UNKNOWN)) or "''"
