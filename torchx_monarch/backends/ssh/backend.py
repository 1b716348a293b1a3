# SPDX-License-Identifier: BSD-3-Clause
"""Run apps on machines that are reached over ssh. The machines keep all state; any client with the handle reads it."""

from __future__ import annotations

import contextlib
import logging
import pprint
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torchx.specs import AppDef

from torchx_monarch.backends.core.backend import Backend, Capabilities, Cfg, CheckResult, LogQuery, read_undamaged
from torchx_monarch.backends.core.errors import SubmitError, SubmittedAlreadyError, UserError
from torchx_monarch.backends.core.options import check_queue
from torchx_monarch.backends.core.snapshot import AppSnapshot, Outcome, ReplicaSnapshot, RoleSnapshot, TimedLines
from torchx_monarch.backends.core.stored_apps import StoredApps
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.ssh import workspace
from torchx_monarch.backends.ssh.connection import (
    MachineConnection,
    RefusedOrderError,
    SshError,
    at_once,
    find_ssh,
    ssh_arguments,
)
from torchx_monarch.backends.ssh.in_job.wire import FoundReplica, Layout, Place, folder_name
from torchx_monarch.backends.ssh.request import SshOpts, SshRequest, parse_hosts, render
from torchx_monarch.model import codec
from torchx_monarch.model.role_spec import RetryPolicy, RoleSpec
from torchx_monarch.model.state import State

_log = logging.getLogger("torchx_monarch")


@dataclass(frozen=True)
class SshSnapshot(AppSnapshot):
    """An app and where it runs."""

    layout: Layout = Layout([])


def build(app_id: str, answers: Iterable[FoundReplica], lost: Mapping[str, SshError]) -> SshSnapshot:
    """Assemble the snapshot of an app from at least one replica; ``lost`` are the machines that cannot be reached."""
    found = {(replica.place.role, replica.place.replica): replica for replica in answers}
    first = next(iter(found.values()))
    place = first.place
    submitted = SubmittedApp.unpack(place.packed, f"the place.json of {app_id} on {first.record.hostname}")
    # A sidecar lives until the others have ended: the wait for a machine must not depend on it.
    living = any(not (replica.record.terminal or submitted.roles[role].sidecar) for (role, _), replica in found.items())
    endings = [replica.ending for replica in found.values() if replica.ending]
    return SshSnapshot(
        app_id=app_id,
        name=submitted.app.name,
        roles=[
            RoleSnapshot(
                spec,
                [
                    _replica(spec.name, k, found[index, k])
                    if (index, k) in found
                    else _absent(spec, k, machine, lost.get(machine), living)
                    for k, machine in enumerate(machines)
                ],
            )
            for index, (spec, machines) in enumerate(zip(submitted.roles, place.layout.machines, strict=True))
        ],
        app=submitted.app,
        created=place.created,
        started=min((replica.record.started for replica in found.values() if replica.record.started), default=0.0),
        grace=first.record.grace,
        ending=min(endings, key=lambda ending: ending.time, default=None),
        events=[event for replica in found.values() for event in replica.events],
        notes=[str(lost[machine]) for machine in place.layout.replicas if machine in lost],
        layout=place.layout,
    )


def _replica(role: str, k: int, found: FoundReplica) -> ReplicaSnapshot:
    snapshot = found.record.replica_snapshot(role, found.ending)
    if not snapshot.state.is_terminal:
        return replace(snapshot, address=found.place.address)
    if snapshot.state is State.FAILED and snapshot.exit_code is None:  # its supervisor was killed
        return replace(snapshot, failure=f"replica {role}/{k} on {snapshot.hostname}: {snapshot.failure}")
    return snapshot


def _absent(spec: RoleSpec, k: int, machine: str, error: SshError | None, living: bool) -> ReplicaSnapshot:
    if error is None:
        failure = f"the folder of replica {spec.name}/{k} on {machine} was removed"
        return ReplicaSnapshot(spec.name, k, State.UNKNOWN, failure=failure if spec.runs_hosts else "")
    reason = f"{machine} cannot be reached: {error.reason}"
    # It may come back; otherwise the other hosts end when its lease has.
    may_return = spec.retry_policy is RetryPolicy.REPLICA and spec.max_retries > 0
    if living or (may_return and not spec.runs_hosts):
        return ReplicaSnapshot(spec.name, k, State.RUNNING, hostname=machine, waiting=reason)
    return ReplicaSnapshot(spec.name, k, State.UNKNOWN, hostname=machine, failure=f"replica {spec.name}/{k}: {reason}")


class SshBackend(Backend[SshOpts, SshRequest, SshSnapshot]):
    """Runs each replica under a supervisor on a machine. Requested CPUs and memory are not enforced."""

    options = SshOpts
    capabilities = Capabilities(supervises=True, waits_for_cancel=True, needs_owner=True)
    poll = 0.3

    def __init__(self) -> None:
        self._connections: dict[tuple[str, str, str], MachineConnection] = {}
        self._submitting = threading.Lock()
        self._stored = StoredApps(Layout, "ssh")
        self.workspace = workspace.SentWorkspace()

    def close(self) -> None:
        while self._connections:
            self._connections.popitem()[1].close()

    def _connection(self, machine: str, python: str, setup: str) -> MachineConnection:
        key = machine, python, setup
        return self._connections.setdefault(key, MachineConnection(*key))

    # -- submitting ----------------------------------------------------------------------------------------------------

    def check_options(self, options: SshOpts) -> None:
        parse_hosts(options.hosts)
        check_queue(options)

    def checks(self, options: SshOpts) -> Iterable[CheckResult]:
        """Check that ssh is there, and that each machine lets this user in and has this package."""
        yield CheckResult("ssh", find_ssh())
        for name in parse_hosts(options.hosts):
            try:
                answer = self._connection(name, options.python, options.setup).ask("hello")
                yield CheckResult(name, f"{answer['hostname']}, {answer['python']}")
            except SshError as error:
                yield CheckResult(name, "no", advice=error.reason)

    def render(self, app: AppDef, submitted: SubmittedApp, options: SshOpts) -> SshRequest:
        return render(app, submitted, options)

    def show(self, request: SshRequest) -> str:
        return pprint.pformat(asdict(request), indent=2, width=80, sort_dicts=False)

    def submit(self, request: SshRequest, submitted: SubmittedApp, credentials: str) -> str:
        """Start all replicas, then confirm them: what is not confirmed ends with the connection."""
        if self._stored.load(request.app_id) is not None:
            raise SubmittedAlreadyError(request.app_id)
        layout = request.layout
        connections = {name: self._connection(name, layout.python, layout.setup) for name in layout.replicas}

        def order_all(order: str) -> None:
            at_once(lambda name: connections[name].ask(order, may_reconnect=False), connections, needs_all=True)

        with self._submitting:  # a connection has the unconfirmed replicas of one submission
            try:
                self._stored.store(request.app_id, layout)
                self._start(request, submitted, credentials, connections)
                order_all("confirm")
            except BaseException as error:
                self._stored.remove(request.app_id)
                # They would do it by themselves when the connection ends; the caller is to find nothing left.
                with contextlib.suppress(SshError):
                    order_all("give_up")
                if isinstance(error, (SshError, OSError)):
                    raise SubmitError(f"the app was not started: {error}") from None
                raise
        return request.app_id

    def _start(
        self,
        request: SshRequest,
        submitted: SubmittedApp,
        credentials: str,
        connections: Mapping[str, MachineConnection],
    ) -> None:
        layout = request.layout
        answers, _ = at_once(lambda name: connections[name].ask("hello"), connections, needs_all=True)
        first = [answers[machines[0]]["address"] for machines in layout.machines]
        hashes = [
            workspace.send(projects, {name: connections[name] for name in machines})
            for projects, machines in zip(request.workspaces, layout.machines, strict=True)
        ]
        app = submitted.to_json()
        place = Place(request.app_id, 0, 0, time.time(), layout, submitted.pack())

        def start(name: str) -> None:
            for role, k in layout.replicas[name]:
                folder = folder_name(request.app_id, role, k)
                replica = {
                    "name": folder,
                    "request": asdict(request.of_replica(role, k, folder, first, credentials, place.created)),
                    "place": asdict(replace(place, role=role, replica=k)),
                    "gpu_count": request.gpus[role],
                    "workspace": hashes[role],
                }
                connections[name].ask("start", may_reconnect=False, **replica, app=app)

        at_once(start, connections, needs_all=True)

    # -- reading -------------------------------------------------------------------------------------------------------

    def _order(self, app_id: str, layout: Layout, order: str, **fields: Any) -> tuple[list[Any], dict[str, SshError]]:
        """Send an order for the replicas of an app; return the answers of machines, and the machines without one."""
        places = layout.replicas

        def send(machine: str) -> Any:
            names = [folder_name(app_id, role, k) for role, k in places[machine]]
            return self._connection(machine, layout.python, layout.setup).ask(order, names=names, **fields)

        answers, lost = at_once(send, places)
        return list(answers.values()), lost

    def snapshot(self, app_id: str, *, brief: bool = False) -> SshSnapshot | None:
        """Read the state of an app from its machines: those that are stored here, or that the first one knows."""
        layout = self._stored.load(app_id)
        if layout is None:
            try:
                ssh_arguments(head := app_id.partition("@")[2])
                (found,) = self._order(app_id, Layout([[head]]), "read", brief=True)[0]
            except (UserError, RefusedOrderError):
                return None
            if not found:
                return None
            layout = codec.decode(FoundReplica, found[0]).place.layout
        answers, lost = self._order(app_id, layout, "read", brief=brief)
        found = [codec.decode(FoundReplica, replica) for answer in answers for replica in answer]
        if not found and lost:
            raise next(iter(lost.values()))
        return build(app_id, found, lost) if found else None

    def snapshots(self, options: Cfg) -> Sequence[SshSnapshot]:
        """Read the state of all apps of the machines that the options name, and of those that are stored here."""
        chosen = SshOpts.from_cfg(self.run_opts().resolve(dict(options)))
        machines = {name: (chosen.python, chosen.setup) for name in parse_hosts(chosen.hosts)}
        for app_id in self._stored.app_ids():
            layout = self._stored.load(app_id) or Layout([])
            machines = {**dict.fromkeys(layout.replicas, (layout.python, layout.setup)), **machines}
        answers, lost = at_once(lambda name: self._connection(name, *machines[name]).ask("read_all"), machines)
        apps: dict[str, list[FoundReplica]] = {}
        for machine, answer in answers.items():
            for reason in answer["damaged"]:
                _log.warning("%s: %s", machine, reason)
            for replica in answer["replicas"]:
                found = codec.decode(FoundReplica, replica)
                apps.setdefault(found.place.app_id, []).append(found)
        return read_undamaged(apps.items(), lambda item: build(*item, lost))

    def read_log(self, app: SshSnapshot, role: str, replica: int, query: LogQuery[SshSnapshot]) -> Iterator[TimedLines]:
        """Yield lines of a replica's log; a log that is followed goes on when its machine has come back."""
        layout = app.layout
        index = [role_snapshot.spec.name for role_snapshot in app.roles].index(role)
        connection = self._connection(layout.machines[index][replica], layout.python, layout.setup)
        fields: dict[str, Any] = {
            "name": folder_name(app.app_id, index, replica),
            "role": role,
            "replica": replica,
            "stream": query.stream,
            "since": query.since.timestamp() if query.since else None,
            "until": query.until.timestamp() if query.until else None,
            "tail": query.tail,
            "ranks": [(ranks.start, ranks.stop) for ranks in query.ranks],
        }
        start, has_ended, answer = 0, False, [TimedLines(0.0, "")]
        while not has_ended or answer:
            has_ended = not query.follow or query.has_ended()  # before the read: the last lines come before the end
            try:
                answer = [TimedLines(*lines) for lines in connection.ask("log", start=start, **fields)]
            except SshError as error:
                if has_ended or isinstance(error, RefusedOrderError):
                    raise
                time.sleep(1.0)
                continue
            fields["tail"] = 0  # said where to begin; what is written from now on is all shown
            last = answer[-1].text if answer else ""
            # The beginning of a line is shown when it is whole, or a progress bar that ends in a whole character.
            if not has_ended and last and (not set("\r\n") & set(last) or last.endswith("\N{REPLACEMENT CHARACTER}")):
                del answer[-1]
            for lines in answer:
                yield lines
                start = lines.end
            if not has_ended and not answer:
                time.sleep(self.poll)

    # -- ending --------------------------------------------------------------------------------------------------------

    def stop(self, app: SshSnapshot, outcome: Outcome, grace: float | None) -> None:
        outcome = replace(outcome, time=outcome.time or time.time())
        self._order(app.app_id, app.layout, "stop", outcome=asdict(outcome), grace=grace)

    def remove(self, app: SshSnapshot) -> None:
        _, lost = self._order(app.app_id, app.layout, "remove")
        if lost:
            raise next(iter(lost.values()))
        self._stored.remove(app.app_id)
