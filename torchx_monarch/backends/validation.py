# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What every scheduler asks of an app's roles, and of a request for the log of one of their replicas."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from torchx.schedulers.api import filter_regex
from torchx.specs import AppDef, RetryPolicy

from torchx_monarch.backends.errors import UserError

_TOGETHER = re.compile(r"-m torchx_monarch\.host (?:(?! -- ).)*--application ", re.DOTALL)
"""Matches the command of a role whose hosts end and restart with those of the other roles
(``controller.role_coordinator``)."""


def check_names(app: AppDef) -> None:
    """Each role needs a name of its own: status and logs know it by that. (TorchX takes two of one name for one role.)

    Raises:
        UserError: two have one name.
    """
    names = [role.name for role in app.roles]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two roles of app {app.name!r} are called {name!r}; each role needs a name of its own")


def check_replica(app_id: str, sizes: Mapping[str, int], role: str, replica: int) -> None:
    """Whether an app has such a replica.

    Args:
        app_id: of the app.
        sizes: how many replicas each of its roles has.
        role: the role asked for.
        replica: the replica asked for.

    Raises:
        UserError: there is no such role or replica.
    """
    if role not in sizes:
        raise UserError(f"app {app_id} has no role {role!r}; its roles are {', '.join(sizes)}")
    if not 0 <= replica < sizes[role]:
        raise UserError(f"role {role} of app {app_id} has no replica {replica}; it has 0 to {sizes[role] - 1}")


def matching(lines: Iterable[str], regex: str | None) -> Iterable[str]:
    """The lines in which a regular expression is found; all of them without one.

    Raises:
        UserError: it is no regular expression.
    """
    if not regex:
        return lines
    try:
        found: Iterable[str] = filter_regex(regex, lines)
    except re.error as error:
        raise UserError(f"{regex!r} is no regular expression: {error}") from error
    return found


def restarts(app: AppDef, counts: Mapping[str, Sequence[int]]) -> int:
    """How often an app was started again: when one replica's failure starts others again too, that is one restart.

    Args:
        app: as it was submitted, with our commands.
        counts: how often each replica of each role was started again.
    """
    alone, together = 0, 0
    roles = {role.name: role for role in app.roles}
    for name, each in counts.items():
        role = roles.get(name)
        if role is not None and _TOGETHER.search(" ".join(role.args)):
            together = max(together, *each)
        elif role is not None and role.retry_policy is RetryPolicy.REPLICA:
            alone += sum(each)
        else:
            alone += max(each)
    return alone + together
