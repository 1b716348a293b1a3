# SPDX-License-Identifier: BSD-3-Clause
"""Render an AppDef and its run options as a Slurm request."""

from __future__ import annotations

import logging
import os
import re
import sys

import torchx
from torchx.schedulers.devices import get_device_mounts
from torchx.specs import NULL_RESOURCE, AppDef, BindMount, DeviceMount, InvalidRunConfigException, Role

from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.slurm import folder, native
from torchx_monarch.backends.slurm.container import Container, Mount
from torchx_monarch.backends.slurm.options import SlurmOpts
from torchx_monarch.backends.slurm.request import SlurmRequest, SlurmRole
from torchx_monarch.model.role_spec import RoleSpec

_log = logging.getLogger(__name__)

_SMALL_PARTITION = 1000
"""MB of memory; Slurm's configuration lacks the memory of nodes that report no more (aws-parallelcluster#2198)."""

_SBATCH = (
    *("partition", "account", "qos", "time", "constraint", "reservation"),
    *("mail-user", "mail-type", "signal"),
)
"""The run options that sbatch has under the same names."""


def render(app: AppDef, submitted: SubmittedApp, cfg: SlurmOpts) -> SlurmRequest:
    """Render the request for an app.

    Raises:
        UserError: a role cannot run in a container as it is, or the job's folder cannot be mounted there.
    """
    retries = any(role.max_retries for role in app.roles)
    requeue = retries if cfg.requeue is None else cfg.requeue
    asks = any(role.resource != NULL_RESOURCE and role.resource.memMB > 0 for role in app.roles)
    memory = native.partition_memory(cfg.partition) if asks and not cfg.nomem else None
    nomem = cfg.nomem or (memory is not None and memory <= _SMALL_PARTITION)
    path = folder.new(app.name, cfg.job_dir)
    if cfg.container and re.search("[:,]", path):
        raise UserError(
            f"pyxis cannot mount the job's folder {path}: it must have neither ':' nor ',' (option job_dir)"
        )
    roles = [
        _role(role, spec, nomem, _gres(role, app, cfg), cfg)
        for role, spec in zip(app.roles, submitted.roles, strict=True)
    ]
    return SlurmRequest(
        name=app.name,
        folder=path,
        python=sys.executable,
        roles=roles,
        sbatch=_job_options(app, cfg, path, requeue),
        grace=float(cfg.grace),
        requeue=requeue,
        retry=cfg.retry,
        lease=float(cfg.lease),
    )


def check_options(cfg: SlurmOpts) -> None:
    """Check the run options that do not depend on the app.

    Raises:
        InvalidRunConfigException: a value is not allowed; the message names the option and says what is.
    """
    if cfg.retry not in ("in_place", "requeue"):
        reason = f"Run option `retry` is {cfg.retry!r}; allowed are in_place and requeue"
        raise InvalidRunConfigException(reason, "retry", dict(cfg))
    if cfg.container not in (None, "pyxis"):
        reason = f"Run option `container` is {cfg.container!r}; allowed is pyxis"
        raise InvalidRunConfigException(reason, "container", dict(cfg))
    # Without B:, Slurm signals all processes of a step, including Monarch's, which the signal would kill.
    if cfg.signal is not None and not re.fullmatch(r"(R?B:|B:?R?:)TERM(@\d+)?", cfg.signal):
        reason = f"Run option `signal` is {cfg.signal!r}; allowed is B:TERM@SECONDS, such as B:TERM@120"
        raise InvalidRunConfigException(reason, "signal", dict(cfg))


def _job_options(app: AppDef, cfg: SlurmOpts, path: str, requeue: bool) -> dict[str, str | None]:
    options: dict[str, str | None] = {
        "job-name": re.sub(r"[^A-Za-z0-9_.-]", "-", app.name) or "app",
        "output": os.path.join(path, "job.log"),
        "open-mode": "append",
        "chdir": path,
        "comment": folder.note(path, cfg.comment),
        "requeue" if requeue else "no-requeue": None,
    }
    given = {name: getattr(cfg, name.replace("-", "_")) for name in _SBATCH}
    options.update({name: str(value) for name, value in given.items() if value is not None})
    if cfg.exclude_nodes:
        options["exclude"] = cfg.exclude_nodes.replace("+", ",")
    if cfg.exclusive:
        options["exclusive"] = None
    return options


def _gres(role: Role, app: AppDef, cfg: SlurmOpts) -> str | None:
    """Return the ``gres`` of a role: the run option for roles that ask for GPUs (for all roles if none does), else its
    number of GPUs; None for no GPUs."""
    gpus = 0 if role.resource == NULL_RESOURCE else max(role.resource.gpu, 0)
    if cfg.gres and (
        gpus or not any(app_role.resource != NULL_RESOURCE and app_role.resource.gpu > 0 for app_role in app.roles)
    ):
        return cfg.gres
    return f"gpu:{gpus}" if gpus else None


def _role(role: Role, spec: RoleSpec, nomem: bool, gres: str | None, cfg: SlurmOpts) -> SlurmRole:
    nodes = str(role.num_replicas)
    sbatch: dict[str, str | None] = {"nodes": nodes, "ntasks-per-node": "1"}
    srun: dict[str, str | None] = {
        "nodes": nodes,
        "ntasks": nodes,
        "ntasks-per-node": "1",
        # Monarch's hosts stop each other when one fails, and then still report the failure. The batch step supervises
        # hosts that have not met, and a role that tolerates failures (``BatchStep._end_intolerable``).
        "kill-on-bad-exit": "0" if spec.runs_hosts or spec.is_elastic else "1",
        # With TorchX's setting, srun ends a step 60 s after its first task has ended, even successfully.
        "wait": "0",
        "export": "ALL",
    }
    resource = role.resource
    if resource != NULL_RESOURCE:
        if resource.cpu > 0:
            # Since Slurm 22.05, srun does not inherit it from the job.
            sbatch["cpus-per-task"] = srun["cpus-per-task"] = str(int(resource.cpu))
        if resource.memMB > 0 and not nomem:
            sbatch["mem"] = srun["mem"] = str(resource.memMB)
    if spec.spares:
        # A job goes on without a node that has failed: a spare one takes its place.
        sbatch["no-kill"] = srun["no-kill"] = None
    if gres:
        sbatch["gres"] = srun["gres"] = gres
    container = None
    if cfg.container is None:
        _warn_of_unused(role)
        in_image = role.image and os.path.isdir(role.image)
        cwd = os.path.abspath(role.image) if in_image else os.getcwd()
    else:
        cwd = os.path.abspath(cfg.job_dir) if cfg.job_dir and role.workspace else os.getcwd()
        container = _container(role, cwd)
    return SlurmRole(
        spec=spec,
        command=[role.entrypoint, *role.args],
        env=dict(role.env),
        cwd=cwd,
        image=role.image,
        sbatch=sbatch,
        srun=srun,
        container=container,
    )


def _container(role: Role, cwd: str) -> Container:
    """Return the container of a role.

    Raises:
        UserError: the role has no image that can be used, or a mount that pyxis cannot make.
    """
    if not role.image or _is_default(role.image):
        given = f"TorchX's default image, {role.image}, has not" if role.image else "it names none"
        raise UserError(
            f"role {role.name!r} runs in a container (-cfg container=pyxis) and needs an image that has "
            f"torchx-monarch, and {given}. Name one with --image: a name in a registry, or a squashfs file"
        )
    mounts = []
    for mount in [*role.mounts, *get_device_mounts(role.resource.devices)]:
        if isinstance(mount, BindMount):
            mounts.append(Mount(os.path.abspath(mount.src_path), mount.dst_path, mount.read_only))
        elif isinstance(mount, DeviceMount):
            mounts.append(Mount(mount.src_path, mount.dst_path))
        else:
            raise UserError(f"role {role.name!r} has a mount of another kind than bind and device: {mount}")
    if cwd != "/" and cwd not in [mount.target for mount in mounts]:
        mounts.append(Mount(cwd, cwd))
    for mount in mounts:
        if re.search("[:,]", mount.source + mount.target):
            raise UserError(
                f"role {role.name!r}: pyxis cannot mount {mount.source} at {mount.target}: paths must have neither "
                "':' nor ','"
            )
    return Container(_enroot_name(role), cwd, mounts)


def _is_default(image: str) -> bool:
    """Return whether an image is the one that TorchX's components name by default."""
    default: str = torchx.IMAGE
    return image.partition(":")[0] == default.partition(":")[0]


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


def _warn_of_unused(role: Role) -> None:
    """Log a warning about the image or the mounts of a role that has no container."""
    if role.image and not os.path.isdir(role.image) and not _is_default(role.image):
        unused = f"the image {role.image} is not used"
    elif role.mounts:
        unused = "its mounts are not used"
    else:
        return
    _log.warning("role %r: %s: -cfg container=pyxis runs containers", role.name, unused)
