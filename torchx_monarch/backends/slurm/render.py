# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Render an AppDef and its run options as a Slurm request."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

from torchx.specs import NULL_RESOURCE, AppDef, InvalidRunConfigException, Role

from torchx_monarch.backends.outcome import RolePolicy
from torchx_monarch.backends.protocols import CREDENTIALS
from torchx_monarch.backends.slurm import array, commands, folder
from torchx_monarch.backends.slurm.options import SlurmOpts
from torchx_monarch.backends.slurm.request import SlurmRequest, SlurmRole
from torchx_monarch.backends.validation import check_names
from torchx_monarch.model.sidecars import is_sidecar

_SMALL_PARTITION = 1000
"""MB of memory; Slurm's configuration lacks the memory of nodes that report no more (aws-parallelcluster#2198)."""


def render(app: AppDef, cfg: SlurmOpts) -> SlurmRequest:
    """Render the request for an app.

    Args:
        app: the app.
        cfg: the run options.

    Raises:
        InvalidRunConfigException: a run option has an invalid value.
        ValueError: two roles have the same name.
    """
    check_names(app)
    _check(cfg)
    if cfg.array is not None:
        _check_array(app, cfg.array, cfg)
    retries = any(role.max_retries for role in app.roles)
    requeue = retries if cfg.requeue is None else cfg.requeue
    asks = any(role.resource != NULL_RESOURCE and role.resource.memMB > 0 for role in app.roles)
    memory = commands.partition_memory(cfg.partition) if asks and not cfg.nomem else None
    nomem = cfg.nomem or (memory is not None and memory <= _SMALL_PARTITION)
    path = folder.new(app.name, cfg.job_dir)
    return SlurmRequest(
        name=app.name,
        folder=path,
        python=sys.executable,
        roles=[_role(role, cfg, nomem, _gres(role, app, cfg)) for role in app.roles],
        sbatch=_job_options(app, cfg, path, requeue),
        grace=float(cfg.grace),
        requeue=requeue,
        retry=cfg.retry,
    )


def _check(cfg: SlurmOpts) -> None:
    options: Mapping[str, object] = dict(cfg)
    if cfg.grace < 0:
        raise InvalidRunConfigException(f"Run option `grace` is {cfg.grace}; give seconds, 0 or more", "grace", options)
    if cfg.retry not in ("in_place", "requeue"):
        reason = f"Run option `retry` is {cfg.retry!r}; allowed are in_place and requeue"
        raise InvalidRunConfigException(reason, "retry", options)
    # Without B:, Slurm signals all processes of a step, including Monarch's, which the signal would kill.
    if cfg.signal is not None and not re.fullmatch(r"(R?B:|B:?R?:)TERM(@\d+)?", cfg.signal):
        reason = f"Run option `signal` is {cfg.signal!r}; allowed is B:TERM@SECONDS, such as B:TERM@120"
        raise InvalidRunConfigException(reason, "signal", options)


def _check_array(app: AppDef, given: str, cfg: SlurmOpts) -> None:
    reason = ""
    try:
        array.parse(given)
    except ValueError as error:
        reason = f"{error}; allowed are indices and ranges, and how many may run at a time: 0-9, 0,3,7-20:2%4"
    if len(app.roles) != 1:
        names = ", ".join(role.name for role in app.roles)
        reason = f"app {app.name!r} has {len(app.roles)} roles ({names}), and Slurm has arrays of one-role jobs only"
    elif module := _waits_for_clients([app.roles[0].entrypoint, *app.roles[0].args]):
        reason = f"role {app.roles[0].name} waits for clients ({module}), which connect to one run, not to several"
    if reason:
        raise InvalidRunConfigException(f"Run option `array` is {given!r}: {reason}", "array", dict(cfg))


def _waits_for_clients(words: list[str]) -> str:
    """Return the module in a command whose hosts wait for clients; empty if the command brings its own program."""
    for module, has_program in (("torchx_monarch.hosts", False), ("torchx_monarch.actors", True)):
        if module in words and not (has_program and "--" in words[words.index(module) :]):
            return module
    return ""


def _job_options(app: AppDef, cfg: SlurmOpts, path: str, requeue: bool) -> dict[str, str | None]:
    options: dict[str, str | None] = {
        "job-name": re.sub(r"[^A-Za-z0-9_.-]", "-", app.name) or "app",
        "output": os.path.join(path, "array", "%a.log") if cfg.array else os.path.join(path, "job.log"),
        "open-mode": "append",
        "chdir": path,
        "comment": folder.note(path, cfg.comment),
        "requeue" if requeue else "no-requeue": None,
    }
    given = {
        "partition": cfg.partition,
        "account": cfg.account,
        "qos": cfg.qos,
        "time": cfg.time,
        "constraint": cfg.constraint,
        "reservation": cfg.reservation,
        "mail-user": cfg.mail_user,
        "mail-type": cfg.mail_type,
        "signal": cfg.signal,
        "array": cfg.array,
    }
    options.update({name: str(value) for name, value in given.items() if value is not None})
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


def _role(role: Role, cfg: SlurmOpts, nomem: bool, gres: str | None) -> SlurmRole:
    nodes = str(role.num_replicas)
    sbatch: dict[str, str | None] = {"nodes": nodes, "ntasks-per-node": "1"}
    ends_together = CREDENTIALS in role.env
    srun = {
        "nodes": nodes,
        "ntasks": nodes,
        "ntasks-per-node": "1",
        # Monarch's hosts stop each other when one fails, and then still report the failure.
        # The batch step supervises a role that tolerates failures (BatchStep._end_intolerable).
        "kill-on-bad-exit": "0" if ends_together or RolePolicy.of(role).elastic else "1",
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
    if gres:
        sbatch["gres"] = srun["gres"] = gres
    in_image = role.image and os.path.isdir(role.image)
    return SlurmRole(
        name=role.name,
        command=[role.entrypoint, *role.args],
        env=dict(role.env),
        cwd=os.path.abspath(role.image) if in_image else os.getcwd(),
        image=role.image,
        replicas=role.num_replicas,
        sbatch=sbatch,
        srun=srun,
        max_retries=role.max_retries,
        retry_policy=str(role.retry_policy.value),
        ends_together=ends_together,
        min_replicas=role.min_replicas,
        sidecar=is_sidecar(role),
    )
