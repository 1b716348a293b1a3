# SPDX-License-Identifier: BSD-3-Clause
"""List the live allocations that this machine has a record of and can reach, for ``torchx monarch ps``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from torchx_monarch.backends.core import client_credentials, state_files
from torchx_monarch.client.connection import ask
from torchx_monarch.client.target import Target
from torchx_monarch.exceptions import RefusedError, UnreachableError
from torchx_monarch.schedulers.job_status import LiveState

_PATIENCE = 3.0
"""Seconds to wait for one allocation's answer."""

_MAX_ASKED = 64
"""Allocations that are asked at the same time."""


@dataclass(frozen=True)
class AllocationInfo:
    """Represent one role of an app whose replica 0 answered.

    Attributes:
        handle: the app's TorchX handle.
        role: name of the role.
        live: what replica 0 answers.
    """

    handle: str
    role: str
    live: LiveState


def list_allocations() -> Iterator[AllocationInfo]:
    """Yield the allocations that answer; apps that have ended do not answer."""
    found = [(handle, role) for handle, roles in [*_local_apps(), *_remote_apps()] for role in roles]
    # All at once: each that is silent takes `_PATIENCE`.
    with ThreadPoolExecutor(_MAX_ASKED) as threads:
        yield from filter(None, threads.map(lambda app_role: _ask_allocation(*app_role), found))


def _ask_allocation(handle: str, role: str) -> AllocationInfo | None:
    """Ask replica 0 of a role; return None if it does not answer, or is not of an allocation."""
    with contextlib.suppress(UnreachableError, RefusedError):
        live = ask_live(Target.from_handle(handle, role))
        return AllocationInfo(handle, role, live) if live is not None else None
    return None


def ask_live(target: Target) -> LiveState | None:
    """Return what the hosts of a live allocation answer, without their runs; None if they are of another job."""
    answer = ask(target, {"type": "look"}, _PATIENCE)
    live = answer.get("live")
    if live is None:
        return None
    facts = {name: live[name] for name in ("ready", "run", "runs", "queued", "idle", "idle_timeout")}
    return LiveState(hosts=len(answer["hosts"]), **facts)


def _local_apps() -> list[tuple[str, list[str]]]:
    from torchx_monarch.backends.local import request as local_request
    from torchx_monarch.model.role_spec import WorkloadKind

    found = []
    try:
        app_ids = sorted(state_files.app_ids())
    except OSError as error:
        raise UnreachableError(f"the apps of this machine cannot be listed: {error}") from None
    for app_id in app_ids:
        request = None
        with contextlib.suppress(state_files.DamagedFileError):
            request = local_request.load(state_files.app_paths(app_id))
        if request is None or not os.path.isdir(request.run_dir):
            continue
        roles = [role.name for role in request.roles if role.spec.workload is WorkloadKind.SESSION]
        if roles:
            found.append((f"monarch_local://torchx/{app_id}", roles))
    return found


def _remote_apps() -> list[tuple[str, list[str]]]:
    return [
        (f"{scheduler}://torchx/{app_id}", list(client_credentials.load(scheduler, app_id)[1]))
        for scheduler, app_id in client_credentials.stored_apps()
    ]
