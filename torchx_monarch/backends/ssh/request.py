# SPDX-License-Identifier: BSD-3-Clause
"""Render an app into the replicas of machines, and store on which machines a submitted app runs."""

from __future__ import annotations

import logging
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from torchx.specs import AppDef, Role, macros

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.errors import StateAccessError, UserError
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.local.render import RANK0_HOST, new_app_id
from torchx_monarch.backends.local.request import LocalRequest, RoleRequest
from torchx_monarch.backends.ssh import workspace
from torchx_monarch.backends.ssh.options import SshOpts, parse_hosts
from torchx_monarch.model.env_names import CREDENTIALS, replica0_variable
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.supervisor.records import ReplicaRequest

_log = logging.getLogger("torchx_monarch")


@dataclass
class SshRequest:
    """One app to run.

    Attributes:
        app_id: id of the app: its name, a random suffix, ``@`` and its first machine.
        name: name of the app.
        machines: for each role the machines of its replicas.
        roles: for each role its spec and replicas.
        gpus: for each role the GPUs that a replica needs.
        workspaces: for each role the folders of its workspace (``workspace.projects``).
        python: the run option ``python``.
        setup: the run option ``setup``.
        grace: the run option ``grace``.
        lease: the run option ``lease``.
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
    def replicas(self) -> list[tuple[int, int]]:
        """Index of the role and id of each replica."""
        return [(index, k) for index, names in enumerate(self.machines) for k in range(len(names))]

    def renamed(self) -> SshRequest:
        """Return the same request under another id."""
        whole = LocalRequest(self.app_id, self.name, self.roles)
        app_id = f"{new_app_id(self.name)}@{self.app_id.partition('@')[2]}"
        return replace(self, app_id=app_id, roles=whole.renamed(app_id).roles)

    def of_replica(self, role: int, k: int, name: str, addresses: Sequence[str], credentials: str) -> LocalRequest:
        """Return the request for the machine of one replica.

        Args:
            addresses: for each role the address of its replica 0.
        """
        spec = self.roles[role].spec
        # The machine restarts its replica alone, whatever happens to others: hosts end and begin again together.
        alone = replace(spec, replicas=1, min_replicas=None, sidecar=False)
        replica = self.roles[role].replicas[k]
        env = {RANK0_HOST: addresses[0], **replica.env}
        env |= {replica0_variable(index): address for index, address in enumerate(addresses)}
        if spec.runs_hosts and credentials:
            env[CREDENTIALS] = credentials
        roles = [RoleRequest(alone, [replace(replica, env=env)], first=k)]
        return LocalRequest(name, self.name, roles, grace=self.grace, lease=self.lease, networked=True)


def render(app: AppDef, submitted: SubmittedApp, options: SshOpts, environ: Mapping[str, str]) -> SshRequest:
    """Return the request that runs an app.

    Raises:
        UserError: there are more replicas than machines.
    """
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
            _role(role, spec, app_id, "." if folders else "")
            for role, spec, folders in zip(app.roles, submitted.roles, workspaces, strict=True)
        ],
        gpus=[max(0, role.resource.gpu) for role in app.roles],
        workspaces=workspaces,
        python=options.python,
        setup=options.setup,
        grace=float(options.grace),
        lease=float(options.lease),
    )


def _role(role: Role, spec: RoleSpec, app_id: str, root: str) -> RoleRequest:
    """Return the replicas of a role.

    Args:
        root: the value of the macro ``img_root``; empty for the working directory.
    """
    cwd = os.path.abspath(role.image) if role.image and os.path.isdir(role.image) else os.getcwd()
    replicas = []
    for k in range(role.num_replicas):
        values = macros.Values(root or cwd, app_id, str(k), RANK0_HOST)
        filled = values.apply(role)
        replicas.append(ReplicaRequest([filled.entrypoint, *filled.args], dict(filled.env), cwd))
    return RoleRequest(spec, replicas)


@dataclass(frozen=True)
class Layout:
    """Where an app runs.

    Attributes:
        machines: for each role the machines of its replicas.
        python: the interpreter of the machines; empty for the one by which they have run an app last.
        setup: the shell commands before it.
    """

    machines: list[list[str]]
    python: str = ""
    setup: str = ""

    @property
    def names(self) -> list[str]:
        """All machines, each once."""
        return list(dict.fromkeys(name for names in self.machines for name in names))


def _folder() -> str:
    return os.path.join(state_files.state_dir(), "ssh")


def _path(app_id: str) -> str:
    return os.path.join(_folder(), urllib.parse.quote(app_id, safe=""))


def store_layout(app_id: str, layout: Layout) -> None:
    """Store where an app runs.

    Raises:
        OSError: that cannot be written, or the folder belongs to another user.
    """
    state_files.make_folder("ssh")
    state_files.write_json(_path(app_id), asdict(layout), below=state_files.state_dir())


def load_layout(app_id: str) -> Layout | None:
    """Return where an app runs; None if that is not stored, or must not be used."""
    try:
        return state_files.load(Layout, _path(app_id), state_files.state_dir())
    except state_files.DamagedFileError as error:
        _log.warning("the machines of %s are not used: %s", app_id, error)
        return None


def app_ids() -> list[str]:
    """Return the ids of all stored apps.

    Raises:
        StateAccessError: another user owns the state directory, or it cannot be read.
    """
    try:
        return state_files.stored_ids(_folder())
    except OSError as error:
        raise StateAccessError.of(error, _folder()) from None


def forget_layout(app_id: str) -> None:
    """Remove what is stored of an app."""
    state_files.remove_file(_path(app_id))
