# SPDX-License-Identifier: BSD-3-Clause
"""What a supervisor runs (request.json), and the record that it writes: the state of that, its replicas, why it ended.

A supervisor runs an app of this machine (its record is status.json), or one replica of an app of several machines
(status.json on a machine of ssh, replica.json in the folder of a batch system's app); or it is the batch step of a job
of Slurm (job.json). Nobody else writes the record; if the supervisor of a machine dies, readers derive the end from its
lock (``folder``).

Environments hold the role's own variables only. The supervisor inherits the submitter's environment and adds these to
it, so that secrets in the user's shell (tokens, passwords) are not written to disk.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field, replace
from string import Template
from typing import TYPE_CHECKING

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.snapshot import AppSnapshot, Outcome, ReplicaSnapshot
from torchx_monarch.backends.core.state import count_restarts
from torchx_monarch.insight import events
from torchx_monarch.model.codec import Seconds
from torchx_monarch.model.env_names import RANK0_HOST
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.model.state import State
from torchx_monarch.supervisor.replica import ReplicaRecord
from torchx_monarch.system import safe_files

if TYPE_CHECKING:
    from torchx.specs import Role


@dataclass
class RoleRequest:
    """One role to run.

    Attributes:
        spec: how many replicas it has, and how it ends and restarts.
        command: program and arguments, with TorchX's macros. The program is looked up on the PATH of the replica's
            environment, then in ``cwd``.
        env: variables over those of the supervisor, with macros as well.
        cwd: the working directory.
        image: the value of the macro ``img_root``.
        first: the id of its first replica; earlier ones run elsewhere.
    """

    spec: RoleSpec
    command: list[str]
    env: dict[str, str]
    cwd: str
    image: str = ""
    first: int = 0

    @classmethod
    def from_role(cls, role: Role, spec: RoleSpec, image: str | None = None) -> RoleRequest:
        """Return the request of a role, which runs in its image if that is a folder, as TorchX does.

        Args:
            image: as the attribute; None for the working directory.
        """
        cwd = os.path.abspath(role.image) if role.image and os.path.isdir(role.image) else os.getcwd()
        return cls(spec, [role.entrypoint, *role.args], dict(role.env), cwd, cwd if image is None else image)

    @property
    def name(self) -> str:
        return self.spec.name

    def filled(self, app_id: str, replica: int) -> tuple[list[str], dict[str, str]]:
        """Return command and environment of a replica: macros are replaced as by ``torchx.specs.macros.Values``."""
        values = {"img_root": self.image, "app_id": app_id, "replica_id": str(replica), "rank0_env": RANK0_HOST}

        def fill(text: str) -> str:
            return Template(text).safe_substitute(values)

        # TorchX does not replace macros in the entrypoint.
        env = {name: fill(value) for name, value in self.env.items()}
        return [self.command[0], *map(fill, self.command[1:])], env


@dataclass
class SupervisorRequest:
    """One app to run, or one replica of an app of several machines, which ssh or a batch system runs.

    Attributes:
        grace: seconds from SIGTERM to SIGKILL when the app is stopped.
        run_dir: the folder for sockets; "" until the app is submitted.
        job: the app's marker, ``<app id>:<random>``, which all of its processes have in their environment as
            MONARCH_JOB; "" until the app is submitted.
        gpus, slots: how many of this machine's it waits for (``machine_queue``).
        job_id: the app's id for users, where ``app_id`` is that of the folder of one replica; empty if it is the same.
        queued: when it was submitted, in seconds since the epoch, for its place in the queue; 0 for when it came here.
        networked: whether its hosts meet those of other machines, by addresses in the environments of the replicas.
    """

    app_id: str
    name: str
    roles: list[RoleRequest]
    grace: float = 30.0
    run_dir: str = ""
    job: str = ""
    networked: bool = False
    gpus: int = 0
    slots: int = 0
    queued: float = 0.0
    job_id: str = ""

    @classmethod
    def load(cls, paths: state_files.AppPaths) -> SupervisorRequest | None:
        """Read the request of an app as submitted; return None if the app does not exist."""
        return state_files.load(cls, paths.request, paths.trusted)


@dataclass
class RoleRecord:
    name: str
    replicas: list[ReplicaRecord] = field(default_factory=list)


@dataclass
class SupervisorRecord:
    """One app, or one replica of an app of several machines.

    Attributes:
        created: when it was submitted, in seconds since the epoch.
        msg: for users: why it ended, and further facts; "" for no message.
        error: the content of the error file of the replica that caused the end, as JSON text; None without one.
        restarts: how often the app, a role or a replica was restarted.
        started: when its first replica was first started; None before.
        hostname: the name of the machine that runs it, by which other hosts reach that; empty once a batch system has
            taken the node away.
        outside: whether Slurm itself has ended the job, so that Slurm's state says how.
    """

    app_id: str
    name: str
    created: Seconds
    state: State = State.PENDING
    msg: str = ""
    error: str | None = None
    restarts: int = 0
    started: Seconds | None = None
    ended: Seconds | None = None
    roles: list[RoleRecord] = field(default_factory=list)
    hostname: str = ""
    grace: float = 30.0
    outside: bool = False

    @classmethod
    def new(cls, request: SupervisorRequest, created: float, hostname: str, restarts: int = 0) -> SupervisorRecord:
        """Return the record of a request before any replica was started; ``restarts``: earlier starts."""
        roles = [
            RoleRecord(role.name, [ReplicaRecord(role.first + k, restarts=restarts) for k in range(role.spec.replicas)])
            for role in request.roles
        ]
        return cls(
            request.app_id,
            request.name,
            created,
            restarts=restarts,
            roles=roles,
            hostname=hostname,
            grace=request.grace,
        )

    @classmethod
    def load(cls, paths: state_files.AppPaths) -> SupervisorRecord | None:
        """Read the record of an app; return None if it does not exist; errors as for ``state_files.load``."""
        record = state_files.load(cls, paths.status, paths.trusted)
        if record is not None:
            record.app_id = paths.app_id
        return record

    @property
    def terminal(self) -> bool:
        return self.state.is_terminal

    @property
    def reserve_bytes(self) -> int:
        """The disk space that suffices for the final record without error files."""
        # Names, and the message, of which ``save_last`` keeps 4,000 characters of six bytes each at most.
        return 64 * 1024 + 256 * sum(len(role.replicas) for role in self.roles)

    def replica_snapshot(self, role: str, ending: Outcome | None) -> ReplicaSnapshot:
        """Return the snapshot of the one replica of this record; ``ending``: how its app was asked to end."""
        (replica,) = self.roles[0].replicas
        ended = replica.ended or self.ended or 0.0
        found = replica.snapshot(role, hostname=self.hostname, restarts=self.restarts, ended=ended)
        if not self.terminal:
            state, waiting = (State.PENDING, self.msg) if replica.state is State.PENDING else (State.RUNNING, "")
            is_stopping = ending is not None
            return replace(found, state=state, waiting=waiting, exit_code=None, ended=0.0, is_stopping=is_stopping)
        if State.SUCCEEDED in (self.state, replica.state):
            return replace(found, state=State.SUCCEEDED, exit_code=0)
        was_stopped = self.state is State.CANCELLED
        state = State.CANCELLED if was_stopped and ending is not None else State.FAILED
        return replace(found, state=state, failure=self.msg, error=replica.error or "", was_stopped=was_stopped)

    def save_last(self, paths: state_files.SupervisorPaths) -> None:
        """Write the final record; on a full disk without what does not fit into the reserve: error files."""
        try:
            state_files.write_json(paths.status, asdict(self))
        except OSError:
            if not os.path.exists(paths.reserve):  # the disk was full from the start
                raise
            try:
                self._write_into_reserve(paths)
            except OSError:
                self.msg, self.error = self.msg[:4000], None
                for role in self.roles:
                    for replica in role.replicas:
                        replica.error = None
                self._write_into_reserve(paths)
        with contextlib.suppress(OSError), open(paths.status, "rb") as file:
            os.fsync(file.fileno())
        with contextlib.suppress(OSError):
            os.unlink(paths.reserve)

    def _write_into_reserve(self, paths: state_files.SupervisorPaths) -> None:
        safe_files.write_into_reserve(paths.reserve, paths.status, json.dumps(asdict(self)).encode())


def run_on_end(
    command: str, app: AppSnapshot, exit_code: int | None, record: SupervisorRecord, paths: state_files.SupervisorPaths
) -> None:
    """Run the user's command for the end of an app, which ``native`` tells; note its failure in the record."""
    from torchx_monarch.insight.job_end import JobEnd  # here: their imports would delay the replicas
    from torchx_monarch.insight.timeline import last_slow

    outcome, restarts, slow = app.native, count_restarts(app), last_slow(app.events)
    assert outcome is not None
    state, message = outcome.state, outcome.message
    end = JobEnd(app.app_id, app.name, state, message, exit_code, app.started or None, outcome.time, restarts, slow)
    if failure := end.run(command, os.environ):
        events.append(paths.events, "on_end", failure)
        record.msg = "; ".join(filter(None, (record.msg, failure)))
        with contextlib.suppress(OSError):  # a full disk
            state_files.write_json(paths.status, asdict(record))
