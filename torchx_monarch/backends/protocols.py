# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Interfaces of a backend whose hosts reach each other over a network, and the credentials in its requests."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Protocol, TypeVar, runtime_checkable

from torchx.specs import AppDef, Role

CREDENTIALS = "MONARCH_CREDENTIALS"
"""The variable that carries the credentials to hosts (``credentials.VARIABLE``, whose module is slow to import)."""

PLACEHOLDER = "(made when the job is submitted)"
"""Replaces the credentials in a dry run, in ``describe`` and wherever else a request is shown."""

T = TypeVar("T")


@runtime_checkable
class NetworkBackend(Protocol):
    """A scheduler whose replicas reach each other over a network."""

    def replica0_host(self, app: AppDef, role: Role) -> str:
        """Return the name by which all replicas of a role reach its replica 0.

        It may contain macros. ``@NAME`` stands for the value of the environment variable NAME on each host. If that is
        unset or ``localhost`` on replica 0, replica 0 uses its machine's name. ``@`` alone means that the name is not
        known until replica 0 runs: it then registers with replica 0 of the first role, which the other hosts query.
        """
        ...


@runtime_checkable
class IndependentRoles(Protocol):
    """A scheduler that lets each role end and restart separately; the hosts coordinate the roles.

    Attributes:
        always_together: whether the scheduler can restart roles only together. The end of one role must then end all,
            whatever the policy.
    """

    always_together: bool


@runtime_checkable
class Reachable(Protocol):
    """A scheduler that knows an address of replica 0 that suits clients better than the replica's host name."""

    def client_host(self, app_id: str, role: str) -> str:
        """Return the name or address; empty if it is unknown, as before replica 0 starts and after it ends."""
        ...


def with_credentials(request: T, credentials: str) -> T:
    """Copy a request, with the credentials for every placeholder in dataclasses, dicts, lists, tuples and strings."""
    filled: T = _fill(copy.deepcopy(request), credentials)
    return filled


def _fill(value: Any, credentials: str) -> Any:
    if isinstance(value, str):
        return value.replace(PLACEHOLDER, credentials)
    if isinstance(value, dict):
        for key in value:
            value[key] = _fill(value[key], credentials)
    elif isinstance(value, list):
        value[:] = [_fill(each, credentials) for each in value]
    elif isinstance(value, tuple) and type(value) is tuple:
        return tuple(_fill(each, credentials) for each in value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            object.__setattr__(value, field.name, _fill(getattr(value, field.name), credentials))
    return value
