# SPDX-License-Identifier: BSD-3-Clause
"""The request: shown by a dry run, stored in the job's folder (request.json) and read there by the job.

Only the owner can read that file, and it holds the commands and environments. On a command line or in the batch script
they would be visible to all users of the node or of the accounting database.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass, field, replace
from typing import Any

from torchx_monarch.backends.slurm import macros
from torchx_monarch.backends.slurm.container import Container
from torchx_monarch.backends.slurm.folder import JobFolder
from torchx_monarch.model import codec
from torchx_monarch.model.env_names import CREDENTIALS
from torchx_monarch.model.role_spec import RoleSpec

_COMPONENTS_OWN = (
    "SLURM_CPUS_PER_TASK",
    "SLURM_GPUS",
    "SLURM_GPUS_PER_NODE",
    "SLURM_MEM_PER_CPU",
    "SLURM_MEM_PER_GPU",
    "SLURM_MEM_PER_NODE",
    "SLURM_TRES_PER_TASK",
)
"""Variables with the resources of the first component, which srun would apply to the steps of the others, too."""

_ENTRYPOINT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "in_job", "entrypoint.py")
"""The script that starts the batch step and the tasks."""


@dataclass
class SlurmRole:
    """One role: a component of the job with one task, which runs one replica, on each of its nodes.

    Attributes:
        spec: how it ends and restarts.
        command: program and arguments, with TorchX's macros, which each task substitutes.
        env: variables that override the job's environment; with macros, too.
        cwd: working directory of the replicas.
        image: value of the macro ``img_root``.
        sbatch: sbatch options of its component, by name without dashes; None for an option without a value.
        srun: srun options of its step, by name without dashes.
        container: what its step runs in; None to run on the node itself.
    """

    spec: RoleSpec
    command: list[str]
    env: dict[str, str]
    cwd: str
    image: str
    sbatch: dict[str, str | None] = field(default_factory=dict)
    srun: dict[str, str | None] = field(default_factory=dict)
    container: Container | None = None

    @property
    def name(self) -> str:
        """The role's name."""
        return self.spec.name


@dataclass
class SlurmRequest:
    """One job.

    Attributes:
        name: the app's name.
        folder: absolute path of the job's folder; all nodes must see it.
        python: the interpreter of the batch step and the tasks.
        roles: the roles, each a component of the job, in this order.
        sbatch: sbatch options of the whole job, by name without dashes; None for an option without a value.
        grace: seconds from SIGTERM to SIGKILL when replicas are stopped.
        requeue: whether Slurm may restart the job after a lost node or a preemption.
        retry: how retries run: ``in_place`` on the same nodes, or ``requeue``.
        lease: seconds for which a host may be stopped (SIGSTOP) until it counts as lost.
    """

    name: str
    folder: str
    python: str
    roles: list[SlurmRole]
    sbatch: dict[str, str | None] = field(default_factory=dict)
    grace: float = 30.0
    requeue: bool = False
    retry: str = "in_place"
    lease: float = 30.0

    @property
    def script(self) -> str:
        """The batch script of the job.

        On the first start the script itself starts the steps, so that they do not wait for a Python interpreter. It
        then replaces itself with the batch step (``in_job.batch_step``), which keeps them as its children.
        """
        lines = ["#!/bin/sh"]
        for index in range(len(self.roles)):
            given = f"$SLURM_JOB_NODELIST_HET_GROUP_{index}" if len(self.roles) > 1 else "$SLURM_JOB_NODELIST"
            lines.append(f'export {macros.nodes_variable(index)}="{given}"')
        lines += [f"unset {name}" for name in self.not_for_steps]
        folder = shlex.quote(self.folder)
        # A job.json shows that this is not the first start; a cancel.json shows that the job was cancelled.
        lines.append(f"if [ ! -e {folder}/job.json ] && [ ! -e {folder}/cancel.json ]; then")
        lines += [
            f'  {shlex.join(self.step(index))} "$SLURM_JOB_ID" 0 &\n  set -- "$@" $!'
            for index in range(len(self.roles))
        ]
        lines += ["fi", f'exec {shlex.join([*self.starter, "job", self.folder])} "$@"', ""]
        return "\n".join(lines)

    @property
    def not_for_steps(self) -> tuple[str, ...]:
        """The variables of the batch step that its sruns must not inherit."""
        return _COMPONENTS_OWN if len(self.roles) > 1 else ()

    def step(self, role: int) -> list[str]:
        """Return the command that starts the step of the role of this index.

        The caller appends the app's id and the number of restarts. setsid keeps signals to the batch step's session
        away from srun, which would end the tasks.
        """
        group = [f"--het-group={role}"] if len(self.roles) > 1 else []
        options = [*group, *option_words(self.step_options(role)), "--input=none", "--label"]
        starter = [*self.starter, "task"]
        if self.roles[role].container is not None:
            starter = ["/bin/sh", JobFolder(self.folder).task_script(role)]
        return ["setsid", "srun", *options, *starter, self.folder, self.roles[role].name]

    def step_options(self, role: int) -> dict[str, str | None]:
        """Return the srun options of the step of the role of this index, by name without dashes."""
        role_request = self.roles[role]
        return {**role_request.srun, **(role_request.container.options(self.folder) if role_request.container else {})}

    @property
    def starter(self) -> list[str]:
        """The command that starts the batch step or a task, without its arguments."""
        return [self.python, "-I", "-S", _ENTRYPOINT]

    def command(self, script: str) -> list[str]:
        """Return the sbatch command that submits the request.

        Options are on the command line because variables such as SBATCH_PARTITION override those in the script, and
        because the script's quoting rules differ between versions of Slurm.
        """
        words = ["sbatch", "--parsable", "--export=ALL"]
        for index, role in enumerate(self.roles):
            if index:
                words.append(":")
            words += option_words({**self.sbatch, **role.sbatch})
        return [*words, script]

    def renamed(self, folder: str) -> SlurmRequest:
        """Return a copy of the request with another folder."""
        options = {name: value and value.replace(self.folder, folder) for name, value in self.sbatch.items()}
        return replace(self, folder=folder, sbatch=options)

    def with_credentials(self, credentials: str) -> SlurmRequest:
        """Return a copy of the request in which all hosts have the job's credentials in their environment."""
        roles = [
            replace(role, env={**role.env, CREDENTIALS: credentials}) if role.spec.runs_hosts else role
            for role in self.roles
        ]
        return replace(self, roles=roles)

    def __str__(self) -> str:
        """Return the text that a dry run shows."""
        lines = [shlex.join(self.command(f"{self.folder}/job.sh")), "", "# job.sh", self.script]
        for index, role in enumerate(self.roles):
            lines.append(f"# role {role.name}: {role.spec.replicas} x, in {role.cwd}")
            lines += [f"export {name}={shlex.quote(value)}" for name, value in role.env.items()]
            lines += [shlex.join(["srun", *option_words(self.step_options(index)), *role.command]), ""]
        return "\n".join(lines)


def decode_or_exit(paths: JobFolder, data: Any) -> SlurmRequest:
    """Decode the request in a process of the job; exit the process with a message if the file is damaged."""
    try:
        return codec.decode(SlurmRequest, data)
    except codec.DecodeError as error:
        sys.exit(f"{paths.request} is damaged: {error}")


def option_words(options: dict[str, str | None] | dict[str, str]) -> list[str]:
    """Return ``{"nodes": "2", "exclusive": None}`` as the arguments ``--nodes=2 --exclusive``."""
    return [f"--{name}" if value is None else f"--{name}={value}" for name, value in options.items()]
