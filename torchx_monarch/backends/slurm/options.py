# SPDX-License-Identifier: BSD-3-Clause
"""The run options of monarch_slurm, named as in TorchX's Slurm scheduler and in sbatch."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchx_monarch.backends.batch.options import AccountOpts


@dataclass
class SlurmOpts(AccountOpts):
    """Run options of monarch_slurm."""

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
