# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The files of the containers of a role's step, in ``containers/INDEX`` of the job's folder.

``task.sh``     the step's command: find Python and this package in the container, and run the task
``prolog.sh``   run by srun outside of an OCI container before the task: note what Slurm tells a task
``config.json`` the configuration of an OCI container (``bundle``), and ``rootfs``, a link to the user's
``is_inside``   says ``no``, and in an OCI container, where ``mark`` is mounted over it, ``yes``
"""

from __future__ import annotations

import json
import os
import shlex

from torchx_monarch.backends.core.state_files import path_name
from torchx_monarch.backends.slurm import bundle
from torchx_monarch.backends.slurm.container import Container, Mount, in_order
from torchx_monarch.backends.slurm.folder import JobFolder

_TASKS_OWN = (
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_CPUS_ON_NODE", "SLURMD_NODENAME"),
    *("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *("GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK"),
)
"""Variables of a task that Slurm (22.05) keeps from OCI containers, which have those of the batch step instead."""

_MODULE = "torchx_monarch.backends.slurm.in_job.entrypoint"

_FIND = f'import importlib.util as u, sys; sys.exit(not u.find_spec("torchx_monarch") or not u.find_spec("{_MODULE}"))'


def write(paths: JobFolder, index: int, role: str, container: Container, *, is_array: bool) -> None:
    """Write the files of a role's container.

    Args:
        paths: the folder of the whole job.
        index: index of the role.
        role: its name.
        container: the container.
        is_array: whether the job is an array.

    Raises:
        OSError: a file cannot be written.
    """
    root = paths.container(index)
    os.makedirs(root)
    files = {"task.sh": _task(paths, root, role, container, is_array)}
    if container.kind == "oci":
        hides = Mount(os.path.join(root, "mark"), os.path.join(root, "is_inside"))
        mounts = [*container.mounts, Mount(paths.root, paths.root), hides]
        config = bundle.derive(container.config, in_order(mounts))
        os.symlink(bundle.root(container.config, container.image), os.path.join(root, bundle.ROOT))
        files |= {"is_inside": "no\n", "mark": "yes\n", "prolog.sh": _prolog(root), bundle.CONFIG: json.dumps(config)}
    for name, text in files.items():
        path = os.path.join(root, name)
        with open(path, "x") as file:
            file.write(text)
        if name == "prolog.sh":
            os.chmod(path, 0o700)


_NOTE = 'read -r name < /proc/sys/kernel/hostname\nnote={}/"$SLURM_JOB_ID.$name.env"\n'
"""Names the file in which the prolog tells the task, by the node's host name, which both see."""


def _prolog(root: str) -> str:
    lines = ["#!/bin/sh", "umask 077", _NOTE.format(shlex.quote(root)) + "{"]
    lines += [f'  [ -z "${{{name}+x}}" ] || echo "export {name}=\'${name}\'"' for name in _TASKS_OWN]
    return "\n".join([*lines, '} > "$note.new"', 'mv "$note.new" "$note"', ""])


def _task(paths: JobFolder, root: str, role: str, container: Container, is_array: bool) -> str:
    """Return the script that runs a task in the container, with the arguments of ``in_job.task``.

    Without Python it writes the task's record itself: exit code 78 (EX_CONFIG), which no retry helps.
    """
    logs = f"{shlex.quote(paths.array)}/$SLURM_ARRAY_TASK_ID/logs" if is_array else shlex.quote(paths.logs)
    lines = ["# FOLDER ROLE JOBID RESTART", "umask 077"]
    if container.kind == "oci":
        lines.append(_NOTE.format(shlex.quote(root)) + '[ ! -e "$note" ] || . "$note"')
        lines += [f"export {name}={shlex.quote(value)}" for name, value in container.env.items() if name.isidentifier()]
    lines.append(
        "fail() {\n"
        "  PATH=$PATH:/usr/bin:/bin\n"
        f'  logs={logs}/{shlex.quote(path_name(role))}/"$SLURM_PROCID"\n'
        '  mkdir -p "$logs"\n'
        '  printf \'{"id": %d, "job_restart": %d, "restarts": %d, "state": "FAILED", "exit_code": 78, "error": "%s", '
        '"hostname": "%s"}\' "$SLURM_PROCID" "$4" "$4" "$5" "$SLURMD_NODENAME" > "$logs/replica.json.new"\n'
        '  mv "$logs/replica.json.new" "$logs/replica.json"\n'
        "  exit 78\n}"
    )
    if container.kind == "oci":
        inside = shlex.quote(os.path.join(root, "is_inside"))
        reason = "Slurm has not run the container, because the node has no oci.conf"
        lines.append(f'read -r is_inside < {inside}\n[ "$is_inside" = yes ] || {_fail(reason)}')
    lines.append(f"command -v python > /dev/null || {_fail(f'the image {container.image} has no python on its PATH')}")
    reason = f"the image {container.image} has no torchx-monarch, or another version of it (pip install torchx-monarch)"
    lines.append(f"python -I -c {shlex.quote(_FIND)} || {_fail(reason)}")
    return "\n".join([*lines, f'exec python -I -m {_MODULE} task "$@"', ""])


def _fail(reason: str) -> str:
    """Return the command that ends a task, for a reason."""
    error = json.dumps({"message": {"message": reason, "errorCode": os.EX_CONFIG}})
    escaped = json.dumps(error)[1:-1]  # the record has the error as JSON text
    return f'{{ echo {shlex.quote(reason)} >&2; fail "$@" {shlex.quote(escaped)}; }}'
