# SPDX-License-Identifier: BSD-3-Clause
"""Summarize an app that has ended, from what its backend knows of it."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from torchx_monarch.backends.core.snapshot import AppSnapshot
from torchx_monarch.backends.core.state import AppStatus, count_restarts
from torchx_monarch.command.rewrite import rank_command
from torchx_monarch.insight.summary import Summary, local_path, show_restarts, show_shape
from torchx_monarch.model.host_result import HostResult
from torchx_monarch.model.state import State

_ROLES_SHOWN = 3


def summary_of(handle: str, app: AppSnapshot, status: AppStatus, submitted: float, now: float) -> Summary:
    """Return the summary of an app that has ended.

    Args:
        submitted: when it was submitted, in seconds since the epoch.
        now: the time, in seconds since the epoch. It counts as the end of an app whose replicas do not tell theirs.
    """
    ended = max((replica.ended for replica in app.replicas), default=0.0)
    seconds = (ended if submitted <= ended <= now else now) - submitted
    facts = show_restarts(count_restarts(app))
    ran = f"{_shape(app)}, {facts}" if app.roles else facts
    if status.state is not State.FAILED:
        return Summary(
            status.state.value,
            handle,
            seconds,
            cause=status.message,
            log=_folder(app),
            ran=ran,
            next=(f"torchx log {handle}", f"torchx delete {handle}"),
        )
    result = HostResult.from_text(status.error)
    replica = ""
    if status.cause is not None:
        role = status.cause.role
        ids = {replica_snapshot.id for replica_snapshot in app.replicas if replica_snapshot.role == role}
        replica = f"/{role}/{result.replica if result.replica in ids else status.cause.id}"
    return Summary(
        status.state.value,
        handle,
        seconds,
        cause="; ".join(filter(None, (result.reason or status.message, *(app.notes if result.reason else ())))),
        traceback=result.traceback,
        log=local_path(result.log) or _folder(app),
        ran=ran,
        next=(f"torchx log {handle}{replica}", f"torchx monarch status {handle}"),
    )


def _shape(app: AppSnapshot) -> str:
    """Return the numbers of hosts and ranks of an app's roles."""
    written = {role.name: role for role in app.app.roles} if app.app is not None else {}
    shapes = []
    for role in app.roles:
        count, name = len(role.replicas) - role.spec.spares, role.spec.name
        command = rank_command(written[name]) if name in written and role.spec.runs_hosts else None
        if not role.spec.runs_hosts:
            shape = f"{count} replica{'s' if count > 1 else ''}"
        else:
            shape = show_shape(count, command.ranks_per_host if command is not None else None)
        if role.spec.spares:
            shape += f" and {role.spec.spares} spare"
        shapes.append(f"{name}: {shape}" if len(app.roles) > 1 else shape)
    more = [f"{len(shapes) - _ROLES_SHOWN} more roles"] if len(shapes) > _ROLES_SHOWN else []
    return ", ".join([*shapes[:_ROLES_SHOWN], *more])


def log_folder(app: AppSnapshot) -> str:
    """Return the folder of an app's logs; empty if this machine does not have it."""
    url = urlsplit(app.ui_url)
    return local_path(unquote(url.path) + "/logs") if url.scheme == "file" else ""


def _folder(app: AppSnapshot) -> str:
    """Return the folder of an app's logs, if it is on this machine; else where a browser shows the app."""
    return app.ui_url if urlsplit(app.ui_url).scheme != "file" else log_folder(app)
