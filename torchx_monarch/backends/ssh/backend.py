# SPDX-License-Identifier: BSD-3-Clause
"""Run apps on machines that are reached over ssh. The machines keep all state; any client with the handle reads it."""

from __future__ import annotations

import contextlib
import logging
import os
import pprint
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from torchx.specs import AppDef

from torchx_monarch.backends.core.backend import Backend, Capabilities, Cfg, LogQuery, read_undamaged
from torchx_monarch.backends.core.errors import SubmitError, UserError
from torchx_monarch.backends.core.snapshot import Outcome
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.core.timed_line import TimedLine
from torchx_monarch.backends.ssh import request, workspace
from torchx_monarch.backends.ssh.in_job.wire import Ending, Place, folder_name
from torchx_monarch.backends.ssh.native import MachineConnection, Machines, RefusedOrderError, SshError, concurrently
from torchx_monarch.backends.ssh.options import MachineName, SshOpts, parse_hosts
from torchx_monarch.backends.ssh.request import Layout, SshRequest, forget_layout, load_layout, render, store_layout
from torchx_monarch.backends.ssh.snapshot import Found, SshSnapshot, build, by_machine
from torchx_monarch.model.check_result import CheckResult, check

_log = logging.getLogger("torchx_monarch")


class SshBackend(Backend[SshOpts, SshRequest, SshSnapshot]):
    """Runs each replica under a supervisor on a machine. Requested CPUs and memory are not enforced."""

    options = SshOpts
    capabilities = Capabilities(separates_roles=True, waits_for_cancel=True)
    poll = 0.3

    def __init__(self) -> None:
        self._machines = Machines()
        self.workspace = workspace.SentWorkspace()

    def close(self) -> None:
        """Close the connections."""
        self._machines.close()

    # -- submitting ----------------------------------------------------------------------------------------------------

    def check_options(self, options: SshOpts) -> None:
        """Check the names of the machines."""
        parse_hosts(options.hosts)

    def checks(self, options: SshOpts | None) -> Iterable[CheckResult]:
        """Check that ssh is there, and that each machine lets this user in and has this package.

        Raises:
            SshError: ssh is missing.
        """
        ssh = shutil.which("ssh")
        if ssh is None:
            raise SshError("", "`ssh` is not on the PATH; install OpenSSH's client (Debian: openssh-client)")
        yield check("ssh", ssh)
        if options is None:
            return
        for name in parse_hosts(options.hosts):
            try:
                answer = self._machines.ask(name, options.python, options.setup, "hello")
                yield check(name, f"{answer['hostname']}, {answer['python']}")
            except SshError as error:
                yield check(name, "no", fail=error.reason)

    def render(self, app: AppDef, submitted: SubmittedApp, options: SshOpts) -> SshRequest:
        """Return the replicas of an app and their machines."""
        return render(app, submitted, options, os.environ)

    def show(self, request: SshRequest) -> str:
        """Return a request as text for a dry run."""
        return pprint.pformat(asdict(request), indent=2, width=80, sort_dicts=False)

    def submit(self, request: SshRequest, submitted: SubmittedApp, credentials: str) -> str:
        """Start all replicas, then confirm them: what is not confirmed ends with the connection.

        Raises:
            SubmitError: a machine cannot be reached or refuses; nothing is left on the others.
        """
        if load_layout(request.app_id) is not None:  # the same dry run is submitted again
            request = request.renamed()
        layout = Layout(request.machines, request.python, request.setup)
        with contextlib.ExitStack() as stack:

            def connect(name: str) -> MachineConnection:
                connection = self._machines.connect(name, request.python, request.setup)
                stack.callback(connection.close)
                return connection

            connections: dict[str, MachineConnection] = {}
            try:
                connections |= dict(zip(layout.names, _all(concurrently(connect, layout.names)), strict=True))
                answers = dict(zip(connections, _all(concurrently(_hello, connections.values())), strict=True))
                addresses = {name: str(answers[name]["address"]) for name in answers}
                store_layout(request.app_id, layout)
                self._start(request, submitted, credentials, connections, addresses)
                _all(concurrently(lambda connection: connection.ask("confirm"), connections.values()))
            except BaseException as error:
                forget_layout(request.app_id)
                # They would do it by themselves when the connection ends; the caller is to find nothing left.
                concurrently(
                    lambda connection: connection.ask("give_up"),
                    [connection for connection in connections.values() if connection.is_open],
                )
                if isinstance(error, (SshError, OSError)):
                    raise SubmitError(f"the app was not started: {error}") from None
                raise
            stack.pop_all()
            for connection in connections.values():
                self._machines.keep(connection)
        self._machines.forget_lost()
        return request.app_id

    def _start(
        self,
        request: SshRequest,
        submitted: SubmittedApp,
        credentials: str,
        connections: dict[str, MachineConnection],
        addresses: dict[str, str],
    ) -> None:
        zeros = [addresses[names[0]] for names in request.machines]
        hashes = workspace.send(request.workspaces, request.machines, connections)
        created, packed, app = time.time(), submitted.pack(), submitted.to_json()

        def start(name: str) -> None:
            names, requests, places, gpus, workspaces = [], [], [], [], []
            for role, k in by_machine(request.machines)[name]:
                names.append(folder_name(request.app_id, role, k))
                requests.append(request.of_replica(role, k, names[-1], zeros, credentials).to_json())
                place = Place(
                    *(request.app_id, role, k, created, request.grace, request.machines),
                    *(request.python, request.setup, packed),
                    address=addresses[name],
                )
                places.append(asdict(place))
                gpus.append(request.gpus[role])
                workspaces.append(hashes[role])
            fields = {"names": names, "requests": requests, "places": places, "gpus": gpus, "workspaces": workspaces}
            connections[name].ask("start", **fields, app=app)

        _all(concurrently(start, connections))

    # -- reading -------------------------------------------------------------------------------------------------------

    def _ask(self, layout: Layout, machine: str, order: str, **fields: Any) -> Any:
        return self._machines.ask(machine, layout.python, layout.setup, order, **fields)

    def _layout(self, app_id: str) -> Layout | None:
        """Return where an app runs: as stored here, else as its first machine says; None if there is no such app.

        Raises:
            SshError: that machine cannot be reached.
            DamagedFileError: a file of the app on it is damaged.
        """
        layout = load_layout(app_id)
        if layout is not None:
            return layout
        head = app_id.partition("@")[2]
        try:
            MachineName.parse(head)
            name = folder_name(app_id, 0, 0)
            (answer,) = self._machines.ask(head, "", "", "read", names=[name])["replicas"]
        except (UserError, RefusedOrderError):
            return None
        found = Found.of(answer, head)
        if found is None:
            return None
        return Layout(found.place.machines, found.place.python, found.place.setup)

    def snapshot(self, app_id: str, *, brief: bool = False) -> SshSnapshot | None:
        """Read the state of an app from its machines.

        Raises:
            SshError: none of them can be reached.
            DamagedFileError: a file of the app is damaged.
        """
        layout = self._layout(app_id)
        if layout is None:
            return None
        places = by_machine(layout.machines)

        def read(machine: str) -> dict[tuple[int, int], Found]:
            names = [folder_name(app_id, role, k) for role, k in places[machine]]
            reply = self._ask(layout, machine, "read", names=names, brief=brief)
            answers = {}
            for (role, k), replica in zip(places[machine], reply["replicas"], strict=True):
                if found := Found.of(replica, reply["hostname"]):
                    answers[role, k] = found
            return answers

        found: dict[tuple[int, int], Found] = {}
        lost: dict[str, SshError] = {}
        for machine, answer in zip(places, concurrently(read, places), strict=True):
            if isinstance(answer, SshError):
                lost[machine] = answer
            else:
                found |= answer
        if found:
            return build(app_id, found, lost)
        if lost:
            raise next(iter(lost.values()))
        return None

    def snapshots(self, options: Cfg) -> Sequence[SshSnapshot]:
        """Read the state of all apps of the machines that the options name, and of those that are stored here.

        Raises:
            StateAccessError: another user owns the state directory.
            SshError: none of the machines can be reached.
        """
        chosen = SshOpts.from_cfg(self.run_opts().resolve(dict(options)))
        machines = {name: (chosen.python, chosen.setup) for name in parse_hosts(chosen.hosts)}
        for app_id in request.app_ids():
            layout = load_layout(app_id)
            for name in layout.names if layout else ():
                machines.setdefault(name, (layout.python, layout.setup))  # type: ignore[union-attr]

        def read(name: str) -> Any:
            return self._machines.ask(name, *machines[name], "read")

        apps: dict[str, dict[tuple[int, int], Found]] = {}
        lost: dict[str, SshError] = {}
        for name, answer in zip(machines, concurrently(read, machines), strict=True):
            if isinstance(answer, SshError):
                lost[name] = answer
                continue
            for found in read_undamaged(answer["replicas"], partial(Found.of, hostname=answer["hostname"])):
                apps.setdefault(found.place.app_id, {})[found.place.role, found.place.replica] = found
        if lost and not apps and len(lost) == len(machines):
            raise next(iter(lost.values()))

        def build_app(app_id: str) -> SshSnapshot:
            machines = next(iter(apps[app_id].values())).place.machines
            places = [name for names in machines for name in names]
            return build(app_id, apps[app_id], {name: error for name, error in lost.items() if name in places})

        return sorted(read_undamaged(apps, build_app), key=lambda app: app.created, reverse=True)

    def read_log(self, app: SshSnapshot, role: str, replica: int, query: LogQuery[SshSnapshot]) -> Iterator[TimedLine]:
        """Yield lines of a replica's log; a log that is followed goes on when its machine has come back."""
        place = app.place
        index = [role_snapshot.spec.name for role_snapshot in app.roles].index(role)
        machine = place.machines[index][replica]
        fields = {
            "name": folder_name(app.app_id, index, replica),
            "role": role,
            "replica": replica,
            "stream": query.stream.value if query.stream else "combined",
            "since": query.since.timestamp() if query.since else None,
            "until": query.until.timestamp() if query.until else None,
            "tail": query.tail,
            "start": 0,
            "follow": query.follow,
        }
        has_ended = query.has_ended if query.follow else None
        while True:
            # Following ends with its connection, and queries of the state go on meanwhile.
            open_one = None if query.follow else self._machines.take(machine, place.python, place.setup)
            try:
                with contextlib.ExitStack() as stack:
                    connection = open_one or self._machines.connect(machine, place.python, place.setup)
                    stack.callback(connection.close)
                    for when, text, end in connection.stream("log", has_ended, **fields):
                        fields["start"] = end
                        yield TimedLine(when, text)
                    if not query.follow:
                        stack.pop_all()
                        self._machines.keep(connection)
                return
            except RefusedOrderError:
                raise
            except SshError:
                if open_one is not None:  # the machine may have been rebooted since
                    continue
                if not query.follow or query.has_ended():
                    raise
                time.sleep(1.0)

    # -- ending --------------------------------------------------------------------------------------------------------

    def stop(self, app: SshSnapshot, outcome: Outcome, grace: float | None) -> None:
        """Ask the supervisors of all replicas to end them.

        Raises:
            SshError: no machine could be reached.
        """
        ending = asdict(Ending(outcome.state, outcome.message, outcome.time or time.time()))
        self._order_all(app, "stop", ending=ending, grace=grace)

    def remove(self, app: SshSnapshot) -> None:
        """Remove the folders of all replicas.

        Raises:
            SshError: a machine could not be reached; the app is then still known.
        """
        lost = self._order_all(app, "remove")
        if lost:
            raise lost[0]
        forget_layout(app.app_id)

    def _order_all(self, app: SshSnapshot, order: str, **fields: Any) -> list[SshError]:
        place = app.place
        layout = Layout(place.machines, place.python, place.setup)
        places = by_machine(place.machines)

        def send_order(machine: str) -> None:
            names = [folder_name(app.app_id, role, k) for role, k in places[machine]]
            self._ask(layout, machine, order, names=names, **fields)

        lost = [result for result in concurrently(send_order, places) if isinstance(result, SshError)]
        if len(lost) == len(places):
            raise lost[0]
        return lost


def _hello(connection: MachineConnection) -> Any:
    return connection.ask("hello")


def _all(results: Sequence[Any]) -> list[Any]:
    """Return the results; raise the first SshError among them."""
    for result in results:
        if isinstance(result, SshError):
            raise result
    return list(results)
