# SPDX-License-Identifier: BSD-3-Clause
"""Derive the replicas of an app from its existing containers, and from the files that hosts have left in these.

A host that must not be restarted has written its result to a marker file (``host.no_restart_marker``), which gives the
final state of the replica: dockerd reports that it has ended with code 0.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from docker.errors import DockerException
from docker.models.containers import Container
from torchx.schedulers.docker_scheduler import LABEL_REPLICA_ID, LABEL_ROLE_NAME, NETWORK

from torchx_monarch.backends.core.snapshot import (
    STOP_CODES,
    AppSnapshot,
    Outcome,
    ReplicaSnapshot,
    RoleSnapshot,
    seconds,
)
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.docker import request
from torchx_monarch.backends.docker.connection import environment, map_concurrently, read_file
from torchx_monarch.insight import events
from torchx_monarch.model.host_result import HostResult
from torchx_monarch.model.job_result import describe_shell_code
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.model.state import State
from torchx_monarch.system import error_files
from torchx_monarch.system.untrusted_text import one_line

_MAX_LINE = 300

_LIVING = {
    "created": State.PENDING,
    "restarting": State.PENDING,
    "running": State.RUNNING,
    "paused": State.RUNNING,
}
"""The state of a replica by dockerd's state of its container; in any other state the container has ended."""


@dataclass(frozen=True)
class DockerSnapshot(AppSnapshot):
    """An app and its containers that exist, by the name of the replica (``ReplicaSnapshot.name``)."""

    containers: Mapping[str, Container] = field(default_factory=dict)


def build(
    app_id: str, containers: Sequence[Container], ending: Outcome | None, results: Mapping[str, HostResult]
) -> DockerSnapshot:
    """Assemble the snapshot of an app, without the content of error files.

    Args:
        containers: its containers; at least one.
        ending: how it was cancelled; None if it was not.
        results: results of hosts that must not be restarted, by the id of the container.
    """
    labels = containers[0].labels
    submitted = SubmittedApp.unpack(labels[request.LABEL_APP], f"the label {request.LABEL_APP} of {app_id}")
    places = {
        f"{container.labels[LABEL_ROLE_NAME]}/{container.labels[LABEL_REPLICA_ID]}": container
        for container in containers
    }
    # All containers are created before the first one starts: until then, those that are missing may be yet to come.
    began = any(seconds(container.attrs["State"]["StartedAt"]) for container in containers)
    is_host_lost = began and any(
        f"{spec.name}/{index}" not in places
        for spec in submitted.roles
        if spec.runs_hosts
        for index in range(spec.replicas)
    )
    is_cancelled = ending is not None
    created = min(seconds(container.attrs["Created"]) for container in containers)

    def read_role(spec: RoleSpec) -> RoleSnapshot:
        names = [f"{spec.name}/{index}" for index in range(spec.replicas)]
        replicas = [
            replica_of(places[name].attrs, results.get(str(places[name].id)), is_cancelled, is_host_lost)
            if name in places
            else _absent(spec, index, began, is_cancelled)
            for index, name in enumerate(names)
        ]
        return RoleSnapshot(spec, replicas)

    roles = [read_role(spec) for spec in submitted.roles]
    removed = [replica for role in roles for replica in role.replicas if replica.state is State.UNKNOWN]
    removed.sort(key=lambda replica: not replica.failure)  # a host first
    notes = [describe_removed(replica.name) for replica in removed[:1]]
    if len(removed) > 1:
        notes.append(f"{len(removed) - 1} more were removed")
    return DockerSnapshot(
        app_id=app_id,
        name=submitted.app.name,
        roles=roles,
        app=submitted.app,
        created=created,
        # Of a container that was restarted, dockerd knows the latest start alone; the first followed its creation.
        started=created if any(replica.restarts for role in roles for replica in role.replicas) else 0.0,
        grace=float(labels[request.LABEL_GRACE]),
        ending=ending,
        notes=notes,
        containers=places,
    )


def replica_of(
    attrs: Mapping[str, Any], result: HostResult | None, is_cancelled: bool, is_host_lost: bool
) -> ReplicaSnapshot:
    """Derive a replica from its container.

    Args:
        attrs: the output of ``docker inspect``.
        result: the result of its host, if that must not be restarted; else None.
        is_cancelled: whether the app was cancelled: a container that was never started never will be.
        is_host_lost: whether the container of a host was removed, so that the rest of the app is stopped.
    """
    state, labels = attrs["State"], attrs["Config"]["Labels"]
    role, index, status = labels[LABEL_ROLE_NAME], int(labels[LABEL_REPLICA_ID]), state["Status"]
    code = state["ExitCode"] if result is None or result.code is None else result.code
    own = _LIVING.get(status) or (State.FAILED if code else State.SUCCEEDED)
    if is_cancelled and status == "created":
        own = State.CANCELLED
    networks = attrs.get("NetworkSettings", {}).get("Networks") or {}
    return ReplicaSnapshot(
        role,
        index,
        own,
        hostname=attrs["Name"].lstrip("/"),
        # The name resolves on the containers' network only.
        address=networks.get(NETWORK, {}).get("IPAddress", "") if own is State.RUNNING else "",
        started=seconds(state["StartedAt"]),
        ended=seconds(state["FinishedAt"]),
        exit_code=code if own in (State.SUCCEEDED, State.FAILED) else None,
        restarts=attrs.get("RestartCount", 0),
        failure=f"replica {role}/{index} {_failure(attrs, code, result)}" if own is State.FAILED else "",
        error=result.to_text() if result else "",
        was_stopped=is_host_lost and code in STOP_CODES and not state.get("OOMKilled"),
    )


def _failure(attrs: Mapping[str, Any], code: int, result: HostResult | None) -> str:
    state = attrs["State"]
    how = state.get("Error") or describe_shell_code(code)
    if state.get("OOMKilled"):
        memory = attrs.get("HostConfig", {}).get("Memory", 0) >> 20
        how += f"; a process in it was killed for want of memory, of which it had {memory} MB (memMB)"
    return f"{how}; not started again: {result.no_retry_reason}" if result else str(how)


def _absent(spec: RoleSpec, index: int, began: bool, is_cancelled: bool) -> ReplicaSnapshot:
    if not began:
        return ReplicaSnapshot(spec.name, index, State.CANCELLED if is_cancelled else State.PENDING)
    # The hosts of its role wait forever for a removed host. A replica of another role may have ended before.
    failure = describe_removed(f"{spec.name}/{index}") if spec.runs_hosts else ""
    return ReplicaSnapshot(spec.name, index, State.UNKNOWN, failure=failure)


def describe_removed(replica: str) -> str:
    """Describe a replica, ROLE/ID, whose container was removed."""
    return f"the container of replica {replica} was removed (docker rm), and its log with it"


def read_results(containers: Sequence[Container]) -> dict[str, HostResult]:
    """Return the results of hosts that must not be restarted, by the id of the container, which has ended with 0."""

    def may_have_result(container: Container) -> bool:
        state = container.attrs["State"]
        has_ended = state["Status"] in ("exited", "dead") and state["ExitCode"] == 0
        return has_ended and request.STARTS in environment(container)

    def read(container: Container) -> HostResult:
        paths = environment(container)[request.STARTS].split(":")
        return HostResult.from_text(next((text for path in paths if (text := read_file(container, path))), ""))

    chosen = [container for container in containers if may_have_result(container)]
    results = zip(chosen, map_concurrently(read, chosen), strict=True)
    return {str(container.id): result for container, result in results if result.forbids_restart}


def add_files(app: DockerSnapshot) -> DockerSnapshot:
    """Return the snapshot of an app with what its hosts wrote: error files and events."""
    hosts = {role.spec.name for role in app.roles if role.spec.runs_hosts}

    def add(replica: ReplicaSnapshot) -> ReplicaSnapshot:
        container = app.containers.get(replica.name)
        if container is None or not replica.started:
            return replica
        if replica.error or replica.state is not State.FAILED:
            return replica
        # The host wrote it before it ended.
        path = environment(container).get(request.ERROR_FILE, "")
        error = error_files.cleaned(read_file(container, path, replica.started))
        why = "" if error or replica.role not in hosts else _why_no_host(container)
        return replace(replica, error=error, failure=replica.failure + why)

    replicas = iter(map_concurrently(add, app.replicas))
    roles = [replace(role, replicas=[next(replicas) for _ in role.replicas]) for role in app.roles]
    first = [app.containers[name] for role in hosts if (name := f"{role}/0") in app.containers]
    return replace(app, roles=roles, events=[*itertools.chain(*map_concurrently(_events, first))])


def _events(container: Container) -> list[events.Event]:
    folder = environment(container).get(request.LOG_DIR, "")
    return events.parse(read_file(container, f"{folder}/{events.FILE}").encode())


def _why_no_host(container: Container) -> str:
    """Describe why a host without an error file may not have started: its last log line; empty if it has none.

    The line is no cause: if the host did start, a rank may have written it, and removed the error file.
    """
    code = container.attrs["State"]["ExitCode"]
    line = ""
    if 0 < code <= 127:  # 127: there is no such command
        with contextlib.suppress(DockerException):
            line = one_line(container.logs(tail=1).decode(errors="replace").strip(), _MAX_LINE)
    return f"; its last output: {line}" if line else ""
