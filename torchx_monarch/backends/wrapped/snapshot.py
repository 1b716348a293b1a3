# SPDX-License-Identifier: BSD-3-Clause
"""Store what is submitted to another TorchX scheduler, and make a snapshot of it and of what that scheduler tells."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchx.schedulers.api import DescribeAppResponse
from torchx.specs import NONE, AppDef, AppState, ReplicaStatus

from torchx_monarch.backends.core.snapshot import AppSnapshot, Outcome, ReplicaSnapshot, RoleSnapshot
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.model.host_result import HostResult
from torchx_monarch.model.job_result import describe_code
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.model.state import State


def state(value: AppState) -> State:
    """Return TorchX's state of an app or a replica as ours."""
    queued = value in (AppState.UNSUBMITTED, AppState.SUBMITTED)
    return State.PENDING if queued else State[value.name]


def stored_app(record: Record | None, response: DescribeAppResponse) -> SubmittedApp:
    """Return the app as the user wrote it; as the other scheduler describes it if there is no record."""
    try:
        return SubmittedApp.from_json(record.submitted if record else None)
    except ValueError:
        app = AppDef(response.app_id, list(response.roles), dict(response.metadata))
        return SubmittedApp(app, [RoleSpec.from_role(role) for role in app.roles])


def build(
    record: Record | None,
    submitted: SubmittedApp,
    response: DescribeAppResponse,
    result: str,
    hostname: str,
) -> AppSnapshot:
    """Return the snapshot of an app. Replicas of which nothing is told are in the app's state.

    Args:
        response: the other scheduler's description; UNKNOWN if it does not know the app.
        result: what the hosts, which the first role alone has, have written of their end: JSON text; empty if that is
            not known.
        hostname: the name of the machine of replicas of which nothing is told; empty if it is not known.
    """
    end, now = HostResult.from_text(result), state(response.state)
    if now is State.UNKNOWN and record is not None and record.cancelled:
        now = State.CANCELLED
    elif now is State.UNKNOWN and result and len(submitted.roles) == 1:
        now = State.FAILED if end.code else State.SUCCEEDED
    native, cause = Outcome(now, "" if response.msg == NONE else response.msg), ""
    if now is State.FAILED:
        error = "" if response.structured_error_msg == NONE else response.structured_error_msg
        # The other scheduler's error does not name its role.
        cause = error if error and len(submitted.roles) == 1 else result if end.reason else ""
        if cause:
            native = Outcome(now)
        elif error:
            native = Outcome(now, HostResult.from_text(error).reason, error)
    statuses = {(status.role, status.id): status for role in response.roles_statuses for status in role.replicas}
    roles = []
    for index, spec in enumerate(submitted.roles):
        default = [ReplicaStatus(replica, response.state, spec.name, hostname) for replica in range(spec.replicas)]
        found = [statuses.get((spec.name, status.id), status) for status in default]
        roles.append(RoleSnapshot(spec, [_replica(status, now, "" if index else cause) for status in found]))
    return AppSnapshot(
        response.app_id,
        submitted.app.name,
        roles,
        submitted.app,
        created=record.created if record else 0.0,
        native=native,
        restarts=max(0, response.num_restarts) + end.rank_restarts,
        ui_url=response.ui_url or "",
    )


def _replica(status: ReplicaStatus, app: State, error: str) -> ReplicaSnapshot:
    """Return the snapshot of a replica; ``error`` is the result of its role's hosts, if the app has failed."""
    own, result = state(status.state), HostResult.from_text(error)
    is_cause = bool(error) and status.id == max(0, result.replica)
    return ReplicaSnapshot(
        status.role,
        status.id,
        app if app.is_terminal and not own.is_terminal else own,
        hostname=status.hostname,
        exit_code=result.code if is_cause else None,
        failure=f"replica {status.role}/{status.id} {describe_code(result.code)}" if is_cause and result.code else "",
        error=error if is_cause else "",
        is_error_lost=bool(error) and not is_cause,
    )


@dataclass(frozen=True)
class Record:
    """What is stored of an app.

    Attributes:
        submitted: ``SubmittedApp.to_json``.
        created: when it was submitted, in seconds since the epoch.
        result_key: the key with which its hosts sign their results in the log (``model.host_result``).
        cancelled: whether its scheduler was asked to cancel it.
    """

    submitted: dict[str, Any] = field(default_factory=dict)
    created: float = 0.0
    result_key: str = ""
    cancelled: bool = False
