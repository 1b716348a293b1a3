# SPDX-License-Identifier: BSD-3-Clause
"""The run options of monarch_slurm, named as in TorchX's Slurm scheduler and in sbatch, and the checks of a cluster."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.errors import BackendError
from torchx_monarch.backends.core.options import NetworkOpts
from torchx_monarch.backends.slurm import commands
from torchx_monarch.model.check_result import CheckResult, check

_COMMANDS = ("sbatch", "scontrol", "squeue", "scancel", "sinfo")

_TIMEOUT = 5.0

_NO_PYXIS = "its srun has no option --container-image: pyxis is not installed (plugstack.conf)"


@dataclass
class SlurmOpts(NetworkOpts):
    """Run options of monarch_slurm."""

    partition: str | None = None
    """The partition to run the job in."""

    account: str | None = None
    """The account to charge."""

    qos: str | None = None
    """Quality of Service."""

    time: str | None = None
    """Time limit: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes[:seconds]."""

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
    """Ask for no memory (partitions whose nodes have 1000 MB or less by Slurm's configuration are asked for none)."""

    comment: str | None = None
    """Comment of the job; a note that says where its folder is follows it."""

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

    retry: str = "in_place"
    """What max_retries does after a failure: `in_place` starts again on the same nodes, `requeue` gives them
    back and queues the job again (Slurm holds it for two minutes)."""

    signal: str | None = None
    """`B:TERM@SECONDS`: stop the job, as its time limit or a preemption nears, so many seconds before; with requeue it
    then goes back into the queue."""


def check_slurm(options: SlurmOpts | None) -> Iterator[CheckResult]:
    """Check that jobs can be submitted with run options; with None, only that Slurm answers."""
    missing = [name for name in _COMMANDS if shutil.which(name) is None]
    advice = f"{', '.join(missing)} not on the PATH; install Slurm's commands (Debian: slurm-client, Red Hat: slurm)"
    yield check("Slurm's commands", shutil.which("sbatch") or "", fail=advice if missing else "")
    if missing:
        return
    version = commands.run(["sinfo", "--version"], _TIMEOUT).strip()
    try:
        answer = commands.run(["scontrol", "ping"], _TIMEOUT)
    except BackendError as error:
        answer = str(error)
    up = re.search(r"\b(is|are) (DOWN/)?UP\b", answer) is not None  # a host may be named up1, and one of two be down
    answer = answer.strip().replace("\n", ", ")
    yield check("slurmctld", f"{version}: {answer}", fail="" if up else "start it, or see SLURM_CONF and the network")
    if not up or options is None:
        return
    yield _check_partition(options.partition)
    if options.container:
        yield check("containers", options.container, fail="" if _has_pyxis() else _NO_PYXIS)
    folder = options.job_dir or state_files.state_dir()
    while not os.path.lexists(folder):
        folder = os.path.dirname(os.path.abspath(folder))
    writable = os.access(folder, os.W_OK | os.X_OK)
    advice = "you cannot write there; name a folder that you can write and all nodes see in -cfg job_dir"
    yield check("folder of jobs", options.job_dir or state_files.state_dir(), fail="" if writable else advice)


def check_pyxis() -> None:
    """Raise BackendError if the cluster cannot run containers."""
    if not _has_pyxis():
        raise BackendError(f"this cluster cannot run -cfg container=pyxis: {_NO_PYXIS}")


def _has_pyxis() -> bool:
    return "--container-image" in commands.run(["srun", "--help"])


def _check_partition(partition: str | None) -> CheckResult:
    """Check that a partition, or Slurm's default one, accepts jobs."""
    which = ["--partition", partition] if partition else []
    try:
        partitions = commands.run(["sinfo", "--noheader", "--format=%P %a %D", *which], _TIMEOUT)
    except BackendError as error:
        return check("partition", partition or "", fail=str(error))
    rows = [fields for fields in map(str.split, partitions.splitlines()) if len(fields) == 3]
    if not partition:
        rows = [fields for fields in rows if fields[0].endswith("*")]
    if not rows:
        reason = "there is no such partition" if partition else "Slurm has no default partition"
        return check("partition", partition or "", fail=f"{reason}; `sinfo` lists them, -cfg partition=NAME takes one")
    name, state, nodes = rows[0][0].rstrip("*"), rows[0][1], sum(int(row[2]) for row in rows if row[2].isdigit())
    advice = "" if state == "up" else "it starts no jobs; name another in -cfg partition"
    return check("partition", f"{name}, {state}, {nodes} nodes", fail=advice)
