# SPDX-License-Identifier: BSD-3-Clause
"""Render an app into the replicas of machines."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torchx.specs import AppDef

from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.local.render import new_app_id, render_role
from torchx_monarch.backends.local.request import LocalRequest, RoleRequest
from torchx_monarch.backends.ssh import workspace
from torchx_monarch.backends.ssh.in_job.wire import Layout
from torchx_monarch.backends.ssh.options import SshOpts, parse_hosts
from torchx_monarch.model.env_names import CREDENTIALS, RANK0_HOST, replica0_variable


@dataclass
class SshRequest:
    """One app to run.

    Attributes:
        app_id: id of the app: its name, a random suffix, ``@`` and its first machine.
        machines: for each role the machines of its replicas.
        gpus: for each role the GPUs that a replica needs.
        workspaces: for each role the folders of its workspace (``workspace.projects``).
    """

    app_id: str
    name: str
    machines: list[list[str]]
    roles: list[RoleRequest]
    gpus: list[int]
    workspaces: list[dict[str, str]]
    python: str
    setup: str
    grace: float
    lease: float

    @property
    def layout(self) -> Layout:
        """Where the app runs."""
        return Layout(self.machines, self.python, self.setup)

    def of_replica(self, role: int, k: int, name: str, first: str, credentials: str) -> LocalRequest:
        """Return the request for the machine of one replica.

        Args:
            name: the id of its folder there.
            first: the address of the first machine, which has replica 0 of each role.
        """
        spec = self.roles[role].spec
        replica = self.roles[role].replicas[k]
        env = {RANK0_HOST: first, **replica.env}
        env |= {replica0_variable(index): first for index in range(len(self.roles))}
        if spec.runs_hosts and credentials:
            env[CREDENTIALS] = credentials
        roles = [RoleRequest(spec.alone(), [replace(replica, env=env)], first=k)]
        return LocalRequest(name, self.name, roles, grace=self.grace, lease=self.lease, networked=True)


def render(app: AppDef, submitted: SubmittedApp, options: SshOpts) -> SshRequest:
    """Return the request that runs an app."""
    hosts = parse_hosts(options.hosts)
    most = max(app.roles, key=lambda role: role.num_replicas)
    if not hosts:
        raise UserError("name the machines: -cfg hosts='alice@a;b;10.0.0.3:2222', or hosts=@FILE with one on each line")
    if most.num_replicas > len(hosts):
        raise UserError(
            f"role {most.name} has {most.num_replicas} replicas, and the machines of run option `hosts` are "
            f"{len(hosts)}; each replica of a role needs a machine of its own"
        )
    app_id = f"{new_app_id(app.name)}@{hosts[0]}"
    workspaces = [workspace.projects(role) for role in app.roles]
    return SshRequest(
        app_id=app_id,
        name=app.name,
        machines=[hosts[: role.num_replicas] for role in app.roles],
        roles=[
            render_role(role, spec, app_id, root="." if folders else "")
            for role, spec, folders in zip(app.roles, submitted.roles, workspaces, strict=True)
        ],
        gpus=[max(0, role.resource.gpu) for role in app.roles],
        workspaces=workspaces,
        python=options.python,
        setup=options.setup,
        grace=float(options.grace),
        lease=float(options.lease),
    )
