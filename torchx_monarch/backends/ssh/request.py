# SPDX-License-Identifier: BSD-3-Clause
"""The run options of monarch_ssh, and the replicas of machines that run an app."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torchx.schedulers.ids import make_unique
from torchx.specs import AppDef

from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.backends.core.options import AvoidOpts, NetworkOpts, QueueOpts, safe_name
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.local.supervision import RoleRequest, SupervisorRequest
from torchx_monarch.backends.ssh import workspace
from torchx_monarch.backends.ssh.connection import ssh_arguments
from torchx_monarch.backends.ssh.in_job.wire import Layout
from torchx_monarch.model.env_names import CREDENTIALS, replica0_variables
from torchx_monarch.model.role_spec import RoleSpec


@dataclass
class SshOpts(QueueOpts, AvoidOpts, NetworkOpts):
    hosts: list[str] = field(default_factory=list)
    """The machines, as ssh names them: `alice@a;b;10.0.0.3:2222`, IPv6 addresses in brackets; or `@FILE`, a file with a
    machine on each line. Replica K of each role runs on the K-th of them; groups have machines of their own."""

    python: str = "python3"
    """The Python interpreter on the machines, in whose environment torchx-monarch is installed."""

    setup: str = ""
    """Shell commands that each machine runs before Python, such as `source env.sh`; what they export is the environment
    of the replicas."""


@dataclass
class SshRequest:
    """One app to run.

    Attributes:
        app_id: id of the app: its name, a random suffix, ``@`` and its first machine.
        layout: where it runs.
        gpus: for each role the GPUs that a replica asks for, and waits for without run options.
        queue: the GPUs and the slots that each replica waits for (``machine_queue``).
        workspaces: for each role the folders of its workspace (``workspace.projects``).
    """

    app_id: str
    name: str
    layout: Layout
    roles: list[RoleRequest]
    gpus: list[int]
    queue: tuple[int, int]
    workspaces: list[dict[str, str]]
    grace: float

    def of_replica(
        self, role: int, k: int, name: str, first: Sequence[str], credentials: str, submitted: float = 0.0
    ) -> SupervisorRequest:
        """Return the request for the machine of one replica.

        Args:
            name: the id of its folder there.
            first: for each role the address of the machine that has its replica 0.
            submitted: when the app was submitted, in seconds since the epoch: its place in the queues of all machines.
        """
        spec = self.roles[role].spec
        machine = ssh_arguments(self.layout.machines[role][k])[-1]
        env = {"MONARCH_NODE": machine, **self.roles[role].env, **replica0_variables(first)}
        if spec.runs_hosts and credentials:
            env[CREDENTIALS] = credentials
        roles = [replace(self.roles[role], spec=spec.alone(), env=env, first=k)]
        request = SupervisorRequest(name, self.name, roles, grace=self.grace, networked=True)
        count, slots = (0, 0) if spec.sidecar else self.queue  # a sidecar shares the machine with the others
        return replace(request, gpus=count, slots=slots, queued=submitted, job_id=self.app_id)


def parse_hosts(hosts: Sequence[str] | None) -> list[str]:
    """Return the names of the machines that the run option ``hosts`` names."""
    names: list[str] = []
    for word in hosts or ():  # TorchX passes None where the option is not given
        if word.startswith("@"):
            try:
                lines = Path(os.path.expanduser(word[1:])).read_text().splitlines()
            except OSError as error:
                raise UserError(f"Run option `hosts`: {word[1:]}: {error.strerror}") from None
            except UnicodeDecodeError:
                raise UserError(f"Run option `hosts`: {word[1:]} is no text, with one machine on each line") from None
            names += [line for line in (line.partition("#")[0].strip() for line in lines) if line]
        else:
            names.append(word.strip())
    for name in names:
        ssh_arguments(name)
        if names.count(name) > 1:
            raise UserError(f"Run option `hosts` names {name} twice; each replica of a role has a machine of its own")
    return names


def render(app: AppDef, submitted: SubmittedApp, options: SshOpts) -> SshRequest:
    hosts = [name for name in parse_hosts(options.hosts) if ssh_arguments(name)[-1] not in options.left_out]
    if not hosts:
        raise UserError("name the machines: -cfg hosts='alice@a;b;10.0.0.3:2222', or hosts=@FILE with one on each line")
    layout = Layout(_machines_of_roles(app, submitted.roles, hosts), options.python, options.setup)
    app_id = f"{make_unique(safe_name(app.name))}@{hosts[0]}"
    workspaces = [workspace.projects(role) for role in app.roles]
    return SshRequest(
        app_id=app_id,
        name=app.name,
        layout=layout,
        roles=[
            RoleRequest.from_role(role, spec, "." if folders else None)
            for role, spec, folders in zip(app.roles, submitted.roles, workspaces, strict=True)
        ],
        gpus=[0 if options.gpus else max(0, role.resource.gpu) for role in app.roles],
        queue=(options.gpus, options.slots),
        workspaces=workspaces,
        grace=float(options.grace),
    )


def _machines_of_roles(app: AppDef, specs: Sequence[RoleSpec], hosts: list[str]) -> list[list[str]]:
    """Return the machines of each role's replicas: roles share machines, but for groups, which are lost one by one."""
    machines, taken = [], 0
    for role, spec in zip(app.roles, specs, strict=True):
        begin = taken if spec.min_groups else 0
        if begin + role.num_replicas > len(hosts):
            others = f", of which other groups have {begin}" if begin else ""
            raise UserError(
                f"role {role.name} has {role.num_replicas} replicas, and the machines of run option `hosts` are "
                f"{len(hosts)}{others}; each replica of a role, and each group, needs a machine of its own"
            )
        machines.append(hosts[begin : begin + role.num_replicas])
        taken += role.num_replicas if spec.min_groups else 0
    return machines
