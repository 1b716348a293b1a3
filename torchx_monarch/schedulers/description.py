# SPDX-License-Identifier: BSD-3-Clause
"""Describe apps for TorchX.

The names, messages and error files of jobs come from programs, and from files that any user may have written. TorchX
prints them unchanged, and its parser for error files fails on some of them, so they are made printable here.
"""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any
from urllib.parse import unquote, urlsplit

from torchx.schedulers.api import DescribeAppResponse, ListAppResponse
from torchx.specs import NONE, AppDef, AppState, ReplicaStatus, Role, RoleStatus

from torchx_monarch.backends.core.snapshot import AppSnapshot, ReplicaSnapshot, RoleSnapshot
from torchx_monarch.backends.core.state import AppStatus, count_restarts
from torchx_monarch.command.rank_command import rank_command
from torchx_monarch.insight.summary import Summary, local_path, show_restarts, show_shape
from torchx_monarch.insight.timeline import Timeline, seconds_to_group
from torchx_monarch.model.host_result import HostResult
from torchx_monarch.model.state import State
from torchx_monarch.schedulers.job_status import build, in_one_line, timeline_of, with_hang
from torchx_monarch.system.safe_files import parse_json
from torchx_monarch.system.untrusted_text import one_line, printable

_MSG_CHARACTERS = 68
"""The length at which YAML, as which TorchX prints a message, keeps it on one line."""

_ROLES_SHOWN = 3

_SLOW_START = 2.0
"""Seconds between the start of a rank and its first process group that are worth a hint."""


def describe(app: AppSnapshot, status: AppStatus) -> DescribeAppResponse:
    """Return TorchX's description of an app, with the roles as the user wrote them; spare hosts count as replicas."""
    # Of a Slurm job whose folder is not on this machine the app is not known.
    written = app.app or AppDef(app.name, [Role(role.spec.name, image="") for role in app.roles])
    return DescribeAppResponse(
        app_id=app.app_id,
        state=AppState[status.state.value],
        num_restarts=count_restarts(app),
        msg=_message(app, status) or NONE,
        structured_error_msg=_printable_error(status.error),
        ui_url=app.ui_url or None,
        metadata=written.metadata,
        roles_statuses=[_role_status(role, status) for role in app.roles],
        roles=_roles_with_spares(written, app),
    )


def _roles_with_spares(written: AppDef, app: AppSnapshot) -> list[Role]:
    """Return the roles with their spare hosts as replicas: TorchX reads the logs of as many replicas as a role has."""
    spares = {role.spec.name: role.spec.spares for role in app.roles}
    return [
        dataclasses.replace(role, num_replicas=role.num_replicas + spares[role.name]) if spares.get(role.name) else role
        for role in written.roles
    ]


def shorten(response: DescribeAppResponse, status: AppStatus) -> DescribeAppResponse:
    """Return a description of an app that has ended, of which ``torchx run --wait`` prints seven short lines.

    TorchX prints all fields as YAML, among them the error files of all replicas. The command's summary follows.
    """
    msg = one_line(HostResult.from_text(status.error).reason or response.msg)
    if len(msg) > _MSG_CHARACTERS:
        msg = f"{msg[: _MSG_CHARACTERS - 3]}..."
    return dataclasses.replace(response, msg=msg, structured_error_msg=NONE, roles_statuses=[])


def _message(app: AppSnapshot, status: AppStatus) -> str:
    """Return why an app has ended or what it waits for, or else what it does."""
    if status.state is State.CANCELLED:
        return with_hang(printable(status.message), timeline_of(app, status, time.time()))
    if status.message or status.state.is_terminal:
        return printable(status.message)
    return in_one_line(build("", app, status))


def list_entry(app: AppSnapshot, status: AppStatus) -> ListAppResponse:
    """Return TorchX's entry for an app in a list."""
    return ListAppResponse(app.app_id, AppState[status.state.value], name=one_line(app.name))


def _role_status(role: RoleSnapshot, status: AppStatus) -> RoleStatus:
    return RoleStatus(one_line(role.spec.name), [_replica_status(replica, status) for replica in role.replicas])


def _replica_status(replica: ReplicaSnapshot, status: AppStatus) -> ReplicaStatus:
    return ReplicaStatus(
        id=replica.id,
        state=AppState[status.state_of(replica).value],
        role=one_line(replica.role),
        hostname=one_line(replica.hostname),
        hostaddr=one_line(replica.address) or NONE,
        structured_error_msg=_printable_error(replica.error),
    )


def _printable_error(text: str) -> str:
    """Return an error file with printable texts; NONE for text that TorchX could not parse as JSON."""
    if not text:
        return str(NONE)
    try:
        return json.dumps(_printable_texts(parse_json(text)))
    except (ValueError, RecursionError):
        return str(NONE)


def _printable_texts(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_printable_texts(nested) for nested in value]
    if isinstance(value, dict):
        return {one_line(name): _printable_texts(nested) for name, nested in value.items()}
    return value


def summary_of(
    handle: str,
    app: AppSnapshot,
    status: AppStatus,
    submitted: float,
    now: float,
) -> Summary:
    """Return the summary of an app that has ended.

    Args:
        submitted: when it was submitted, in seconds since the epoch.
        now: the time, in seconds since the epoch. It counts as the end of an app whose replicas do not tell theirs.
    """
    ended, timeline = max((replica.ended for replica in app.replicas), default=0.0), timeline_of(app, status, now)
    facts, result = show_restarts(count_restarts(app)), HostResult.from_text(status.error)
    summary = Summary(
        status.state.value,
        handle,
        (ended if submitted <= ended <= now else now) - submitted,
        cause=with_hang(status.message, timeline) if status.state is State.CANCELLED else status.message,
        log=_log_place(app),
        ran=f"{_describe_shape(app)}, {facts}" if app.roles else facts,
        hint=_start_hint(timeline) if status.state is State.SUCCEEDED else "",
        next=(f"torchx log {handle}", f"torchx monarch report {handle} -o job.html"),
    )
    if status.state is not State.FAILED:
        return summary
    replica = ""
    if status.cause is not None:
        ids = {replica.id for replica in app.replicas if replica.role == status.cause.role}
        replica = f"/{status.cause.role}/{result.replica if result.replica in ids else status.cause.id}"
    return dataclasses.replace(
        summary,
        cause="; ".join((result.reason, *app.notes)) if result.reason else status.message,
        traceback=result.traceback,
        log=local_path(result.log) or summary.log,
        next=(f"torchx log {handle}{replica}", f"torchx monarch status {handle}"),
    )


def _start_hint(timeline: Timeline) -> str:
    """Return what would start the ranks of a job sooner that took some time to their first process group."""
    if (seconds := seconds_to_group(timeline)) < _SLOW_START:
        return ""
    unshared = next((role.unshared for role in timeline.roles if role.unshared), "")
    shared = (
        f"the first import that they do not share: {one_line(unshared)}"
        if unshared
        else "with -cfg preload=auto, what a program imports in its first statements is imported once per host, and "
        "what it imports later by each rank"
    )
    return f"ranks took {seconds:.1f} s or more until their process group had formed; {shared}"


def _describe_shape(app: AppSnapshot) -> str:
    written = {role.name: role for role in app.app.roles} if app.app is not None else {}
    shapes = []
    for role in app.roles[:_ROLES_SHOWN]:
        count, name = len(role.replicas) - role.spec.spares, role.spec.name
        if role.spec.runs_hosts:
            command = rank_command(written[name]) if name in written else None
            shape = show_shape(count, command.ranks_per_host if command is not None else None)
        else:
            shape = f"{count} replica{'s' if count > 1 else ''}"
        if role.spec.spares:
            shape += f" and {role.spec.spares} spare"
        shapes.append(f"{name}: {shape}" if len(app.roles) > 1 else shape)
    if (more := len(app.roles) - _ROLES_SHOWN) > 0:
        shapes.append(f"{more} more roles")
    return ", ".join(shapes)


def log_folder(app: AppSnapshot) -> str:
    """Return the folder of an app's logs; empty if this machine does not have it."""
    url = urlsplit(app.ui_url)
    return local_path(unquote(url.path) + "/logs") if url.scheme == "file" else ""


def _log_place(app: AppSnapshot) -> str:
    """Return the folder of an app's logs, if it is on this machine; else where a browser shows the app."""
    return app.ui_url if urlsplit(app.ui_url).scheme != "file" else log_folder(app)
