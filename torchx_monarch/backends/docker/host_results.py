# SPDX-License-Identifier: BSD-3-Clause
"""Read the results of hosts that must not be restarted: dockerd restarts them regardless, once; they end with code 0.

Such a host has written its result to a marker file in its container (``host.no_restart_marker``). The marker gives the
final state of the replica; the state that dockerd reports is that of a later start, in which no rank ran.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from docker.errors import DockerException

from torchx_monarch.backends.core.snapshot import ReplicaSnapshot
from torchx_monarch.backends.docker import request
from torchx_monarch.backends.docker.native import environment, map_concurrently, read_file
from torchx_monarch.backends.docker.snapshot import DockerSnapshot
from torchx_monarch.model.host_result import HostResult
from torchx_monarch.model.state import State
from torchx_monarch.system import error_files
from torchx_monarch.system.untrusted_text import one_line

if TYPE_CHECKING:
    from docker.models.containers import Container

_NO_SUCH_COMMAND = 127

_MAX_LINE = 300


def read_results(containers: Sequence[Container]) -> dict[str, HostResult]:
    """Return the results of hosts that must not be restarted, by the id of the container.

    Only a container that has ended and of which a start has failed can have one.
    """

    def may_have_result(container: Container) -> bool:
        state = container.attrs["State"]
        failed = state["ExitCode"] != 0 or container.attrs.get("RestartCount", 0) > 0
        return failed and state["Status"] in ("exited", "dead") and request.STARTS in environment(container)

    def read(container: Container) -> HostResult:
        paths = environment(container)[request.STARTS].split(":")
        return HostResult.from_text(next((text for path in paths if (text := read_file(container, path))), ""))

    chosen = [container for container in containers if may_have_result(container)]
    results = zip(chosen, map_concurrently(read, chosen), strict=True)
    return {str(container.id): result for container, result in results if result.forbids_restart}


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
    line = ""
    if 0 < code <= _NO_SUCH_COMMAND:
        with contextlib.suppress(DockerException):
            line = one_line(container.logs(tail=1).decode(errors="replace").strip(), _MAX_LINE)
    if re.search(r"No module named '?torchx_monarch", line):
        line += "; install torchx-monarch in the image"
    elif line and code == _NO_SUCH_COMMAND:
        line += "; the image needs a `python` on its PATH, in which torchx-monarch is installed"
    return f"; its last output: {line}" if line else ""
