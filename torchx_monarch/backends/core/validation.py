# SPDX-License-Identifier: BSD-3-Clause
"""Check an app's roles and images, and a request for the log of one of their replicas."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import torchx
from torchx.schedulers.api import filter_regex
from torchx.specs import AppDef

from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.model.role_spec import RoleSpec


def check_names(app: AppDef) -> None:
    """Check that no two roles of an app have the same name: status and logs identify a role by its name.

    TorchX would treat them as one role.

    Raises:
        UserError: two roles have the same name.
    """
    names = [role.name for role in app.roles]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two roles of app {app.name!r} are called {name!r}; each role needs a name of its own")


def check_images(app: AppDef, specs: Sequence[RoleSpec]) -> None:
    """Check that each role that runs hosts names an image that may have this package.

    Args:
        app: the app, before workspaces are built into its images.
        specs: what is known of its roles, in the same order.

    Raises:
        UserError: a role has no image, or the default image of TorchX's components, which lacks this package.
    """
    for role, spec in zip(app.roles, specs, strict=True):
        if not spec.runs_hosts:
            continue
        if not role.image:
            reason = "it names none"
        elif role.image.partition(":")[0] == torchx.IMAGE.partition(":")[0]:
            reason = f"TorchX's default image, {role.image}, has not"
        else:
            continue
        raise UserError(
            f"role {role.name!r} needs an image that has torchx-monarch, and {reason}. Name one with --image, or for "
            "all runs in .torchxconfig ([component:monarch.spmd] image = my/image). To build one, in the repository of "
            "torchx-monarch: docker build -f docker/Dockerfile -t my/image ."
        )


def check_replica(app_id: str, sizes: Mapping[str, int], role: str, replica: int) -> None:
    """Check that an app has a replica.

    Args:
        app_id: id of the app, for the message.
        sizes: number of replicas of each of its roles, by the role's name.
        role: name of the role.
        replica: id of the replica.

    Raises:
        UserError: the app has no such role, or the role no such replica.
    """
    if role not in sizes:
        raise UserError(f"app {app_id} has no role {role!r}; its roles are {', '.join(sizes)}")
    if not 0 <= replica < sizes[role]:
        raise UserError(f"role {role} of app {app_id} has no replica {replica}; it has 0 to {sizes[role] - 1}")


def matching(lines: Iterable[str], regex: str | None) -> Iterable[str]:
    """Return the lines in which a regular expression matches; all of them if it is empty or None.

    Raises:
        UserError: it is not a valid regular expression.
    """
    if not regex:
        return lines
    try:
        found: Iterable[str] = filter_regex(regex, lines)
    except re.error as error:
        raise UserError(f"{regex!r} is no regular expression: {error}") from error
    return found
