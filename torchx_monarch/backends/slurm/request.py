# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What is submitted: shown by a dry run, kept in the job's folder (request.json) and read there by the job.

Commands and environments travel in that file, which only its owner can read: on a command line or in the job's script
everybody on the node, or in the accounting database, would see them.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torchx_monarch.backends.outcome import RolePolicy
from torchx_monarch.backends.slurm import macros
from torchx_monarch.backends.slurm.folder import JobFolder
from torchx_monarch.model import codec

_COMPONENTS_OWN = (
    "SLURM_CPUS_PER_TASK",
    "SLURM_GPUS",
    "SLURM_GPUS_PER_NODE",
    "SLURM_MEM_PER_CPU",
    "SLURM_MEM_PER_GPU",
    "SLURM_MEM_PER_NODE",
    "SLURM_TRES_PER_TASK",
)
"""What says what the first component has asked for, and would count for every other one's step."""


@dataclass
class RoleRequest:
    """One role: a component of the job with a task on each of its nodes.

    Attributes:
        command: with TorchX's macros, which each task replaces.
        env: set over the environment of the job; with macros, too.
        cwd: working folder.
        image: what the macro ``img_root`` stands for.
        replicas: nodes.
        sbatch: options of its component.
        srun: options of its step.
        max_retries: how often the scope that ``retry_policy`` names is started again.
        retry_policy: APPLICATION, ROLE or REPLICA.
        ends_together: its replicas see to it themselves that all end when one fails, as Monarch's hosts do.
        min_replicas: how many replicas it can do with; None for all.
        sidecar: whether it ends with the other roles.
    """

    name: str
    command: list[str]
    env: dict[str, str]
    cwd: str
    image: str
    replicas: int
    sbatch: dict[str, str | None] = field(default_factory=dict)
    srun: dict[str, str] = field(default_factory=dict)
    max_retries: int = 0
    retry_policy: str = "APPLICATION"
    ends_together: bool = False
    min_replicas: int | None = None
    sidecar: bool = False

    @property
    def policy(self) -> RolePolicy:
        """What decides how it and the app end."""
        return RolePolicy(self.replicas, self.min_replicas, self.sidecar)

    def filled(self, app_id: str, replica: int) -> tuple[list[str], dict[str, str]]:
        """Command and environment of one replica."""
        return macros.filled(self.command, self.env, self.image, app_id, replica)


@dataclass
class SlurmRequest:
    """One job.

    Attributes:
        name: of the app.
        folder: of the job; all nodes must see it.
        python: the interpreter of the batch step and the tasks.
        roles: each a component of the job, in this order.
        sbatch: options of the job as a whole.
        grace: seconds from SIGTERM to SIGKILL when replicas are stopped.
        requeue: whether Slurm may start the job again after a lost node or a preemption.
        retry: ``in_place`` on the same nodes, or ``requeue``.
    """

    name: str
    folder: str
    python: str
    roles: list[RoleRequest]
    sbatch: dict[str, str | None] = field(default_factory=dict)
    grace: float = 30.0
    requeue: bool = False
    retry: str = "in_place"

    @property
    def script(self) -> str:
        """The batch script, of each array task where there is an array.

        It begins the steps of the job's first start itself, so that they wait for no interpreter; ``job`` takes them
        over as its children.
        """
        array = bool(self.sbatch.get("array"))
        app_id = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' if array else '"$SLURM_JOB_ID"'
        lines = ["#!/bin/sh"]
        for index in range(len(self.roles)):
            given = f"$SLURM_JOB_NODELIST_HET_GROUP_{index}" if len(self.roles) > 1 else "$SLURM_JOB_NODELIST"
            lines.append(f'export {macros.nodes_variable(index)}="{given}"')
        lines += [f"unset {name}" for name in self.not_for_steps]
        folder = shlex.quote(self.folder)
        task = f'{shlex.quote(JobFolder(self.folder).array)}/"$SLURM_ARRAY_TASK_ID"'
        # What says that this is no first start, or that none is wanted.
        files = [f"{task}/job.json", f"{task}/cancel.json"] if array else [f"{folder}/job.json"]
        tests = [f"[ ! -e {file} ]" for file in (*files, f"{folder}/cancel.json")]
        lines.append(f"if {' && '.join(tests)}; then")
        lines += [
            f'  {shlex.join(self.step(index))} {app_id} 0 &\n  set -- "$@" $!' for index in range(len(self.roles))
        ]
        lines += ["fi", f'exec {shlex.join([*self.starter, "job", self.folder])} "$@"', ""]
        return "\n".join(lines)

    @property
    def not_for_steps(self) -> tuple[str, ...]:
        """Variables of the batch step that its srun must not see."""
        return _COMPONENTS_OWN if len(self.roles) > 1 else ()

    def step(self, role: int) -> list[str]:
        """The words that begin the step of a role; the app's id and the number of the restart are to follow.

        It has a session of its own: a signal to the batch step's is not for srun, which would end the tasks.
        """
        group = [f"--het-group={role}"] if len(self.roles) > 1 else []
        options = [*group, *option_words(self.roles[role].srun), "--input=none", "--label"]
        return ["setsid", "srun", *options, *self.starter, "task", self.folder, self.roles[role].name]

    @property
    def starter(self) -> list[str]:
        """The words that start the batch step or a task."""
        return [self.python, "-I", "-S", os.path.join(os.path.dirname(os.path.abspath(__file__)), "entrypoint.py")]

    def command(self, script: str) -> list[str]:
        """The words that submit it.

        Options stand here and not in the script: there, variables such as SBATCH_PARTITION would win over them, and
        quoting differs between versions of Slurm.

        Args:
            script: path of the batch script.
        """
        words = ["sbatch", "--parsable", "--export=ALL"]
        for index, role in enumerate(self.roles):
            if index:
                words.append(":")
            words += option_words({**self.sbatch, **role.sbatch})
        return [*words, script]

    def renamed(self, folder: str) -> SlurmRequest:
        """The same request with another folder."""
        return replace(self, folder=folder)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> SlurmRequest:
        """Read what ``to_json`` has made.

        Raises:
            codec.DecodeError: it is no request; the message says what is wrong where.
        """
        return codec.decode(cls, data)

    def __str__(self) -> str:
        """What a dry run shows."""
        lines = [shlex.join(self.command(f"{self.folder}/job.sh")), "", "# job.sh", self.script]
        for role in self.roles:
            lines.append(f"# role {role.name}: {role.replicas} x, in {role.cwd}")
            lines += [f"export {name}={shlex.quote(value)}" for name, value in role.env.items()]
            lines += [shlex.join(["srun", *option_words(role.srun), *role.command]), ""]
        return "\n".join(lines)


def decode_or_exit(paths: JobFolder, data: Any) -> SlurmRequest:
    """Read the request in a step of the job; ends the process, with a message, where the file is damaged.

    Args:
        paths: the job's folder.
        data: what its request.json holds.
    """
    try:
        return SlurmRequest.from_json(data)
    except codec.DecodeError as error:
        sys.exit(f"{paths.request} is damaged: {error}")


def option_words(options: dict[str, str | None] | dict[str, str]) -> list[str]:
    """``{"nodes": "2", "exclusive": None}`` as the words ``--nodes=2 --exclusive``."""
    return [f"--{name}" if value is None else f"--{name}={value}" for name, value in options.items()]
