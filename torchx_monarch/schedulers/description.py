# SPDX-License-Identifier: BSD-3-Clause
"""Describe apps for TorchX.

The names, messages and error files of jobs come from programs, and from files that any user may have written. TorchX
prints them unchanged, and its parser for error files fails on some of them, so they are made printable here.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from torchx.schedulers.api import DescribeAppResponse, ListAppResponse
from torchx.specs import NONE, AppDef, AppState, ReplicaStatus, Role, RoleStatus

from torchx_monarch.backends.core.snapshot import AppSnapshot, ReplicaSnapshot
from torchx_monarch.backends.core.state import AppStatus, count_restarts
from torchx_monarch.model.host_result import HostResult
from torchx_monarch.model.state import State
from torchx_monarch.schedulers.job_status import build, in_one_line
from torchx_monarch.system.safe_files import parse_json
from torchx_monarch.system.untrusted_text import one_line, printable

_MSG_CHARACTERS = 68
"""The length at which YAML, as which TorchX prints a message, keeps it on one line."""


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
        roles_statuses=[
            RoleStatus(one_line(role.spec.name), [_replica_status(replica, status) for replica in role.replicas])
            for role in app.roles
        ],
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
        return build("", app, status).cause
    if status.message or status.state.is_terminal:
        return printable(status.message)
    return in_one_line(build("", app, status))


def list_entry(app: AppSnapshot, status: AppStatus) -> ListAppResponse:
    return ListAppResponse(app.app_id, AppState[status.state.value], name=one_line(app.name))


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
