# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a backend whose hosts are on a network adds to a TorchX scheduler, and the credentials that it carries."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Protocol, TypeVar, runtime_checkable

from torchx.specs import AppDef, Role

CREDENTIALS = "MONARCH_CREDENTIALS"
"""The variable in which host processes get them (``credentials.VARIABLE``, whose import costs)."""

PLACEHOLDER = "(made when the job is submitted)"
"""Stands for the credentials in a dry run, in ``describe`` and wherever else a request is shown."""

T = TypeVar("T")


@runtime_checkable
class NetworkBackend(Protocol):
    """A scheduler whose replicas reach each other over a network."""

    def replica0_host(self, app: AppDef, role: Role) -> str:
        """The name by which all replicas of a role reach its replica 0.

        It may hold macros. ``@NAME`` stands for the value that the environment variable NAME has on each host; unset or
        ``localhost`` on replica 0 itself, it means that machine. ``@`` alone: nobody knows it before that replica runs,
        and it tells replica 0 of the first role, which the others ask.
        """
        ...


@runtime_checkable
class RolesApart(Protocol):
    """A scheduler that lets each role end and begin again by itself: it is the hosts who see to the others.

    Attributes:
        always_together: whether roles can only begin again together, so that the end of one must end all, whatever the
            policy.
    """

    always_together: bool


@runtime_checkable
class Reachable(Protocol):
    """A scheduler that knows better than by a replica's host name how its machine reaches a role's replica 0."""

    def client_host(self, app_id: str, role: str) -> str:
        """The name or address; empty when it is not known, for one that has ended or not begun."""
        ...


def with_credentials(request: T, credentials: str) -> T:
    """A copy of a request in which every placeholder is the credentials: dataclasses, dicts, lists and strings."""
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
