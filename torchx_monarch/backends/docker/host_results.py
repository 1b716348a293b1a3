# SPDX-License-Identifier: BSD-3-Clause
"""Read the results of hosts that must not be restarted: dockerd restarts them regardless, once; they end with code 0.

Such a host has written its result to a marker file in its container (``host.no_restart_marker``). The marker gives the
final state of the replica; the state that dockerd reports is that of a later start, in which no rank ran.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchx_monarch.backends.core.snapshot import ReplicaSnapshot
from torchx_monarch.backends.docker import request
from torchx_monarch.backends.docker.native import environment, last_line, map_concurrently, read_file
from torchx_monarch.backends.docker.snapshot import DockerSnapshot
from torchx_monarch.model.host_result import HostResult
from torchx_monarch.model.state import State
from torchx_monarch.system import error_files
from torchx_monarch.system.untrusted_text import one_line

if TYPE_CHECKING:
    from docker.models.containers import Container

_NO_SUCH_COMMAND = 127

_LONGEST_LINE = 300


class HostResults:
    """Read the marker files of containers, and cache them for callers that poll."""

    def __init__(self) -> None:
        self._known: dict[str, HostResult] = {}
        self._without: set[tuple[str, str]] = set()

    def read(self, containers: Sequence[Container]) -> Mapping[str, HostResult]:
        """Return the results that hosts have written, by the id of the container."""
        map_concurrently(self._look, [container for container in containers if self._may_have_result(container)])
        return self._known

    def _may_have_result(self, container: Container) -> bool:
        """Whether to read the marker: only of a container of which a start has failed, and once for each start.

        A host writes the marker as the last action of a start.
        """
        state: Mapping[str, Any] = container.attrs["State"]
        if str(container.id) in self._known or request.STARTS not in environment(container):
            return False
        if state["Status"] == "running":
            restarts: int = container.attrs.get("RestartCount", 0)
            return restarts > 0 and (str(container.id), state["StartedAt"]) not in self._without
        if state["Status"] in ("restarting", "created"):
            return bool(state["Status"] == "restarting")
        return bool(state["ExitCode"] != 0 or container.attrs.get("RestartCount", 0))

    def _look(self, container: Container) -> None:
        paths = environment(container)[request.STARTS].split(":")
        text = next((text for path in paths if (text := read_file(container, path))), "")
        result = HostResult.from_text(text)
        if result.forbids_restart:
            self._known[str(container.id)] = result
        elif container.attrs["State"]["Status"] == "running":
            self._without.add((str(container.id), container.attrs["State"]["StartedAt"]))


if TYPE_CHECKING:
    from docker.models.containers import Container


def add_files(app: DockerSnapshot) -> DockerSnapshot:
    """Return the snapshot of an app with what its hosts wrote: error files, and how often they restarted ranks."""
    hosts = {role.spec.name for role in app.roles if role.spec.runs_hosts}

    def add(replica: ReplicaSnapshot) -> ReplicaSnapshot:
        container = app.containers.get(replica.name)
        if container is None or not replica.started:
            return replica
        if replica.id == 0:
            replica = replace(replica, rank_restarts=_rank_restarts(container))
        if replica.error or replica.state is not State.FAILED:
            return replica
        # The host wrote it before it ended.
        path = environment(container).get(request.ERROR_FILE, "")
        error = error_files.cleaned(read_file(container, path, replica.started))
        why = "" if error or replica.role not in hosts else _why_no_host(container)
        return replace(replica, error=error, failure=replica.failure + why)

    replicas = iter(map_concurrently(add, app.replicas))
    roles = [replace(role, replicas=[next(replicas) for _ in role.replicas]) for role in app.roles]
    return replace(app, roles=roles)


def _rank_restarts(container: Container) -> int:
    """Count the rank restarts in the events of a replica 0."""
    text = read_file(container, environment(container).get(request.EVENTS, ""))
    return sum('"rank_restart"' in line for line in text.splitlines())


def _why_no_host(container: Container) -> str:
    """Describe why a host without an error file may not have started: its last log line; empty if it has none.

    The line is no cause: if the host did start, a rank may have written it, and removed the error file.
    """
    code = container.attrs["State"]["ExitCode"]
    line = one_line(last_line(container), _LONGEST_LINE) if 0 < code <= _NO_SUCH_COMMAND else ""
    if re.search(r"No module named '?torchx_monarch", line):
        line += "; install torchx-monarch in the image"
    elif line and code == _NO_SUCH_COMMAND:
        line += "; the image needs a `python` on its PATH, in which torchx-monarch is installed"
    return f"; its last output: {line}" if line else ""
