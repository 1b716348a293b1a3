# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Render an AppDef and its run options as a Slurm request."""

from __future__ import annotations

import logging
import os
import re
import sys

from torchx.specs import NULL_RESOURCE, AppDef, InvalidRunConfigException, Role

from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.slurm import array, container_role, folder, native
from torchx_monarch.backends.slurm.options import SlurmOpts
from torchx_monarch.backends.slurm.request import SlurmRequest, SlurmRole
from torchx_monarch.command.command import HOSTS_MODULE
from torchx_monarch.model.role_spec import RoleSpec, WorkloadKind

_log = logging.getLogger(__name__)

_SMALL_PARTITION = 1000
"""MB of memory; Slurm's configuration lacks the memory of nodes that report no more (aws-parallelcluster#2198)."""

_SBATCH = (
    *("partition", "account", "qos", "time", "constraint", "reservation"),
    *("mail-user", "mail-type", "signal", "array"),
)
"""The run options that sbatch has under the same names."""


def render(app: AppDef, submitted: SubmittedApp, cfg: SlurmOpts) -> SlurmRequest:
    """Render the request for an app.

    Args:
        app: the app, with the host process before each rank command.
        submitted: what is known of its roles.
        cfg: the run options.

    Raises:
        InvalidRunConfigException: the run option ``array`` has an invalid value, or one that the app does not allow.
    """
    if cfg.array is not None:
        _check_array(app, submitted, cfg)
    retries = any(role.max_retries for role in app.roles)
    requeue = retries if cfg.requeue is None else cfg.requeue
    asks = any(role.resource != NULL_RESOURCE and role.resource.memMB > 0 for role in app.roles)
    memory = native.partition_memory(cfg.partition) if asks and not cfg.nomem else None
    nomem = cfg.nomem or (memory is not None and memory <= _SMALL_PARTITION)
    path = folder.new(app.name, cfg.job_dir)
    if cfg.container == "pyxis" and re.search("[:,]", path):
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
    container_role.check_option(cfg.container)
    # Without B:, Slurm signals all processes of a step, including Monarch's, which the signal would kill.
    if cfg.signal is not None and not re.fullmatch(r"(R?B:|B:?R?:)TERM(@\d+)?", cfg.signal):
        reason = f"Run option `signal` is {cfg.signal!r}; allowed is B:TERM@SECONDS, such as B:TERM@120"
        raise InvalidRunConfigException(reason, "signal", dict(cfg))


def _check_array(app: AppDef, submitted: SubmittedApp, cfg: SlurmOpts) -> None:
    reason = ""
    try:
        array.parse(cfg.array or "")
    except ValueError as error:
        reason = f"{error}; allowed are indices and ranges, and how many may run at a time: 0-9, 0,3,7-20:2%4"
    if len(app.roles) != 1:
        names = ", ".join(role.name for role in app.roles)
        reason = f"app {app.name!r} has {len(app.roles)} roles ({names}), and Slurm has arrays of one-role jobs only"
    elif submitted.roles[0].workload is WorkloadKind.SESSION:
        reason = f"role {app.roles[0].name} waits for clients ({HOSTS_MODULE}), which connect to one run, not several"
    if reason:
        raise InvalidRunConfigException(f"Run option `array` is {cfg.array!r}: {reason}", "array", dict(cfg))


def _job_options(app: AppDef, cfg: SlurmOpts, path: str, requeue: bool) -> dict[str, str | None]:
    options: dict[str, str | None] = {
        "job-name": re.sub(r"[^A-Za-z0-9_.-]", "-", app.name) or "app",
        "output": os.path.join(path, "array", "%a.log") if cfg.array else os.path.join(path, "job.log"),
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
    if cfg.gres and (gpus or not any(one.resource != NULL_RESOURCE and one.resource.gpu > 0 for one in app.roles)):
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
        if warning := container_role.unused(role):
            _log.warning("%s", warning)
        in_image = role.image and os.path.isdir(role.image)
        cwd = os.path.abspath(role.image) if in_image else os.getcwd()
    else:
        cwd = os.path.abspath(cfg.job_dir) if cfg.job_dir and role.workspace else os.getcwd()
        container = container_role.of_role(cfg.container, role, cwd)
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
