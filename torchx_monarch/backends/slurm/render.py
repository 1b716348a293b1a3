# SPDX-License-Identifier: BSD-3-Clause
"""The run options of monarch_slurm, named as in TorchX's Slurm scheduler and in sbatch, and the request for an app."""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchx.schedulers.devices import get_device_mounts
from torchx.specs import AppDef, BindMount, DeviceMount, Role

from torchx_monarch.backends.batch.options import AccountOpts
from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.backends.core.options import AvoidOpts, is_default_image
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.local.supervision import RoleRequest
from torchx_monarch.backends.slurm.batch_step import SlurmRequest, SlurmRole, option_words
from torchx_monarch.model.role_spec import RoleSpec

_log = logging.getLogger(__name__)

_SBATCH = "partition account qos time constraint reservation comment mail-user mail-type signal"
"""The run options that sbatch has under the same names."""


@dataclass
class SlurmOpts(AvoidOpts, AccountOpts):
    partition: str | None = None
    """The partition to run the job in."""

    qos: str | None = None
    """Quality of Service."""

    constraint: str | None = None
    """Features that the nodes must have."""

    reservation: str | None = None
    """The reservation to run in."""

    exclude_nodes: str | None = None
    """Nodes that the job must not use, separated by `+`: `node7+node9`, `node[1-3]`."""

    exclusive: bool = False
    """Share no node with another job."""

    gres: str | None = None
    """Generic resources of each node, such as `gpu:a100:4`, in place of the number of GPUs that a role asks for."""

    container: str | None = None
    """Run hosts and ranks in containers of `--image`: `pyxis` (enroot's images). Default: on the nodes themselves, and
    an image that is a folder is the working directory."""

    nomem: bool = False
    """Ask for no memory, where Slurm does not know that of the nodes (`Memory specification can not be satisfied`)."""

    comment: str | None = None
    """Comment of the job."""

    mail_user: str | None = field(default=None, metadata={"cfg_key": "mail-user"})
    """User to mail."""

    mail_type: str | None = field(default=None, metadata={"cfg_key": "mail-type"})
    """Events to mail about."""

    job_dir: str | None = None
    """Folder for the copy of the workspace, which must not exist then, and for the folder of the job with its logs. All
    nodes must see it. Default: the state directory, with no copy of the workspace."""

    requeue: bool | None = None
    """Start the job again from its beginning when a node is lost or the job is preempted. Default: if a role has
    max_retries."""

    signal: str | None = None
    """`B:TERM@SECONDS`: stop the job, as its time limit or a preemption nears, so many seconds before; with requeue it
    then goes back into the queue."""


def render(app: AppDef, submitted: SubmittedApp, options: SlurmOpts, path: str) -> SlurmRequest:
    """Return the request for an app; ``path`` is the job's folder."""
    requeue = any(role.max_retries for role in app.roles) if options.requeue is None else options.requeue
    roles = []
    for role, spec in zip(app.roles, submitted.roles, strict=True):
        roles.append(_role(role, spec, _gres(role, app, options), options, path))
    request = SlurmRequest(
        name=app.name,
        folder=path,
        roles=roles,
        commands=[],
        grace=float(options.grace),
        requeue=requeue,
    )
    components = [shared] if (shared := _share_allocation(roles)) else [role.sbatch for role in roles]
    job_options = _job_options(app, options, path, requeue)
    # On the command line, because variables such as SBATCH_PARTITION override options in the script, and because the
    # script's quoting rules differ between versions of Slurm.
    words = ["sbatch", "--parsable", "--export=ALL"]
    for index, component in enumerate(components):
        words += [":"] * (index > 0) + option_words({**job_options, **component}) + shlex.split(options.submit_args)
    request.commands.append([*words, os.path.join(path, "job.sh")])
    return request


def _share_allocation(roles: Sequence[SlurmRole]) -> dict[str, str | None]:
    """Have groups, or elastic roles, run on nodes of one allocation, and other roles beside the first group.

    Slurm 22.05 ends a job of components with any node of it, whatever ``--no-kill`` says (``Killing JobId=1+0(1) on
    failed node n3`` in the log of slurmctld). A job without components loses the node alone.

    Returns:
        the options of the allocation; empty if the roles are components: one is not elastic, or asks for others.
    """
    groups = [role for role in roles if role.spec.min_groups]
    sharing = groups or (roles if len(roles) > 1 and all(role.spec.is_elastic for role in roles) else ())
    if not sharing:
        return {}
    options = {**sharing[0].sbatch, "nodes": str(sum(role.spec.replicas for role in sharing)), "no-kill": None}
    for role in sharing:
        if role.sbatch | {"nodes": None, "no-kill": None} != options | {"nodes": None}:
            if not groups:
                return {}
            raise UserError(f"the group {role.spec.name!r} asks for other resources than the first; all share one job")
    nodes = 0
    for role in roles:
        if role not in sharing:
            role.srun = {"gres": "none", **role.srun, "relative": "0", "overlap": None}
            continue
        role.srun["relative"] = str(nodes)
        nodes += role.spec.replicas
    return options


def _job_options(app: AppDef, cfg: SlurmOpts, path: str, requeue: bool) -> dict[str, str | None]:
    options: dict[str, str | None] = {
        "job-name": re.sub(r"[^A-Za-z0-9_.-]", "-", app.name) or "app",
        "output": os.path.join(path, "job.log"),
        "open-mode": "append",
        "chdir": path,
        "requeue" if requeue else "no-requeue": None,
    }
    given = {name: getattr(cfg, name.replace("-", "_")) for name in _SBATCH.split()}
    options.update({name: str(value) for name, value in given.items() if value is not None})
    if excluded := [*filter(None, (cfg.exclude_nodes or "").split("+")), *cfg.left_out]:
        options["exclude"] = ",".join(excluded)
    if cfg.exclusive:
        options["exclusive"] = None
    return options


def _gres(role: Role, app: AppDef, cfg: SlurmOpts) -> str | None:
    """Return the ``gres`` of a role: the run option for roles that ask for GPUs (for all roles if none does), else its
    number of GPUs; None for no GPUs."""
    gpus = max(role.resource.gpu, 0)
    if cfg.gres and (gpus or all(app_role.resource.gpu <= 0 for app_role in app.roles)):
        return cfg.gres
    return f"gpu:{gpus}" if gpus else None


def _role(role: Role, spec: RoleSpec, gres: str | None, cfg: SlurmOpts, job: str) -> SlurmRole:
    nodes = str(role.num_replicas)
    sbatch: dict[str, str | None] = {"nodes": nodes, "ntasks-per-node": "1"}
    srun: dict[str, str | None] = {
        "nodes": nodes,
        "ntasks": nodes,
        "ntasks-per-node": "1",
        # The tasks start their replicas again, and the batch step ends the rest of a job that has failed.
        "kill-on-bad-exit": "0",
        # With TorchX's setting, srun ends a step 60 s after its first task has ended, even successfully.
        "wait": "0",
        "export": "ALL",
    }
    resource = role.resource
    if resource.cpu > 0:
        # Since Slurm 22.05, srun does not inherit it from the job.
        sbatch["cpus-per-task"] = srun["cpus-per-task"] = str(int(resource.cpu))
    if resource.memMB > 0 and not cfg.nomem:
        sbatch["mem"] = srun["mem"] = str(resource.memMB)
    if spec.is_elastic:  # which it is with spare hosts
        # The job goes on without a node that has failed.
        sbatch["no-kill"] = srun["no-kill"] = None
    if gres:
        sbatch["gres"] = srun["gres"] = gres
    rendered = RoleRequest.from_role(role, spec, role.image)
    if cfg.container is None:
        if role.image and not os.path.isdir(role.image) and not is_default_image(role.image):
            unused = f"the image {role.image} is not used"
            _log.warning("role %r: %s: -cfg container=pyxis runs containers", role.name, unused)
    else:
        rendered.cwd = os.path.abspath(cfg.job_dir) if cfg.job_dir and role.workspace else os.getcwd()
        srun.update(_container(role, rendered.cwd, job))
    return SlurmRole(**vars(rendered), sbatch=sbatch, srun=srun)


def _container(role: Role, cwd: str, job: str) -> dict[str, str]:
    """Return the srun options by which pyxis runs a role's step in containers: task, host and ranks.

    The job's folder and the working directory are mounted under their own paths, so that every path of the request
    means the same inside and outside.
    """
    mounts = {path: f"{path}:{path}" for path in (job, cwd) if path != "/"}
    for mount in [*role.mounts, *get_device_mounts(role.resource.devices)]:
        if not isinstance(mount, (BindMount, DeviceMount)):
            raise UserError(f"role {role.name!r} has a mount of another kind than bind and device: {mount}")
        bind = f"{os.path.abspath(mount.src_path)}:{mount.dst_path}"
        mounts[mount.dst_path] = f"{bind}:ro" if isinstance(mount, BindMount) and mount.read_only else bind
    # Each folder before those inside of it, which it would hide.
    targets = sorted(mounts, key=lambda target: target.rstrip("/").count("/"))
    return {
        "container-image": _enroot_name(role),
        "container-mounts": ",".join(mounts[target] for target in targets),
        "container-workdir": cwd,
    }


def _enroot_name(role: Role) -> str:
    """Return a role's image as enroot spells it, which separates registry and name by ``#``."""
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
