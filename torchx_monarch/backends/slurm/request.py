# SPDX-License-Identifier: BSD-3-Clause
"""The request as the job reads it, and the words of sbatch and srun. Standard library only.

Only the owner can read request.json, and it holds the commands and environments. On a command line or in the batch
script they would be visible to all users of the node or of the accounting database.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from torchx_monarch.backends import entrypoint
from torchx_monarch.backends.batch.folder import BatchRequest
from torchx_monarch.backends.local.supervision import RoleRequest

_STARTER = (sys.executable, "-I", "-S", entrypoint.__file__)
"""The command that starts what runs in the job, without its arguments: the batch step has the submitter's Python."""


@dataclass
class SlurmRole(RoleRequest):
    """One role: a step of the job, with one task on each of its nodes.

    Attributes:
        sbatch: sbatch options of its component, by name without dashes; None for an option without a value.
        srun: srun options of its step; with ``container-image`` it runs in containers of pyxis.
    """

    sbatch: dict[str, str | None] = field(default_factory=dict)
    srun: dict[str, str | None] = field(default_factory=dict)

    @property
    def image_name(self) -> str:
        """The image of its containers; empty if it runs on the nodes themselves."""
        return self.srun.get("container-image") or ""


@dataclass
class SlurmRequest(BatchRequest):
    """One job.

    Attributes:
        requeue: whether Slurm may restart the job after a lost node or a preemption.
        on_end: the command that the batch step runs when the job has ended; empty for none.
    """

    roles: list[SlurmRole]  # type: ignore[assignment]
    requeue: bool = False
    on_end: str = ""

    @property
    def script(self) -> str:
        """The batch script of the job."""
        return f"#!/bin/sh\nexec {shlex.join([*_STARTER, 'slurm.batch_step', self.folder])}\n"

    def step(self, index: int) -> list[str]:
        """Return the command that starts the step of the role of this index.

        setsid keeps signals to the batch step's session away from srun, which would end the tasks.
        """
        role = self.roles[index]
        is_component = len(self.roles) > 1 and "relative" not in role.srun  # else the roles share an allocation
        group = [f"--het-group={index}"] if is_component else []
        # An image has its own Python, whatever path the submitter's has.
        starter = ("python", "-I", "-m", entrypoint.__name__) if role.image_name else _STARTER
        words = ["setsid", "srun", *group, *option_words(role.srun), "--input=none", "--label"]
        return [*words, *starter, "batch.task", self.folder, str(index), "SLURM_PROCID-0"]


def option_words(options: Mapping[str, str | None]) -> list[str]:
    """Return ``{"nodes": "2", "exclusive": None}`` as the arguments ``--nodes=2 --exclusive``."""
    return [f"--{name}" if value is None else f"--{name}={value}" for name, value in options.items()]
