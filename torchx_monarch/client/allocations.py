# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The live allocations that this machine knows of and can reach."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchx_monarch.backends import client_credentials
from torchx_monarch.backends.local import state_files
from torchx_monarch.backends.local.request import load as load_request
from torchx_monarch.client.connection import ask
from torchx_monarch.client.target import Target
from torchx_monarch.exceptions import RefusedError, UnreachableError

_PATIENCE = 3.0
"""Seconds for each."""


@dataclass(frozen=True)
class FoundAllocation:
    """One role of an app.

    Attributes:
        handle: of the app.
        hosts: how many have come.
        live: what its replica 0 says of itself.
    """

    handle: str
    hosts: int
    live: dict[str, Any]


def waiting_hosts() -> Iterator[FoundAllocation]:
    """Those that answer; apps that have ended do not."""
    for handle, roles in [*_of_this_machine(), *_elsewhere()]:
        for role in roles:
            with contextlib.suppress(UnreachableError, RefusedError):
                answer = ask(Target.of(handle, role), {"type": "look"}, _PATIENCE)
                if "live" in answer:
                    yield FoundAllocation(handle, len(answer["hosts"]), answer["live"])


def _of_this_machine() -> list[tuple[str, list[str]]]:
    from torchx_monarch.command.command import HOSTS_MODULE  # not for `torchx --help`, which imports this module

    found = []
    try:
        app_ids = sorted(state_files.app_ids())
    except OSError as error:
        raise UnreachableError(f"the apps of this machine cannot be listed: {error}") from None
    for app_id in app_ids:
        request = None
        with contextlib.suppress(state_files.DamagedFileError):
            request = load_request(state_files.app_paths(app_id))
        if request is None or not os.path.isdir(request.run_dir):
            continue
        roles = [one.name for one in request.roles if one.replicas and HOSTS_MODULE in " ".join(one.replicas[0].args)]
        if roles:
            found.append((f"monarch_local://torchx/{app_id}", roles))
    return found


def _elsewhere() -> list[tuple[str, list[str]]]:
    return [
        (f"{scheduler}://torchx/{app_id}", list(client_credentials.kept(scheduler, app_id)[1]))
        for scheduler, app_id in client_credentials.known()
    ]
