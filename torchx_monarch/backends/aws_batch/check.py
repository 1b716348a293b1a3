# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Check an app of Monarch hosts against the limits of AWS Batch: refuse it, or warn the user."""

from __future__ import annotations

import logging

from torchx.specs import AppDef, RetryPolicy, Role

from torchx_monarch.backends.protocols import CREDENTIALS
from torchx_monarch.model.sidecars import is_sidecar

_log = logging.getLogger("torchx_monarch")


def warn_of_unawaited(app: AppDef) -> None:
    """Warn of roles that Batch ends with the first role though they are not sidecars.

    Only host processes wait for another role. So these are the roles without hosts, or all if the first has no hosts.
    """
    runs_ranks = [CREDENTIALS in role.env for role in app.roles]
    ended = [
        role.name
        for role, ranks in list(zip(app.roles, runs_ranks, strict=True))[1:]
        if not (ranks and runs_ranks[0]) and not is_sidecar(role)
    ]
    if ended:
        _log.warning(
            "AWS Batch ends role %s when the first role, %s, has ended: only roles of torchrun or Python commands wait "
            "for each other. Mark what is to end so as a sidecar, or make it an app of its own (docs/backends.md)",
            ", ".join(ended),
            app.roles[0].name,
        )


def check_hosts(role: Role, main: Role) -> None:
    """Check that the hosts of a role can find each other and that Batch can implement the role's retry policy.

    Args:
        role: the role.
        main: the app's first role; its replica 0 is Batch's main node.

    Raises:
        ValueError: the hosts cannot find each other, or the role has retries with ``RetryPolicy.REPLICA``.
    """
    if CREDENTIALS not in role.env or role.num_replicas == 1:
        return
    if CREDENTIALS not in main.env:
        raise ValueError(
            f"role {role.name!r} has {role.num_replicas} replicas that are to meet, and AWS Batch tells its nodes the "
            f"address of the first role's replica 0 alone, where no host of ours would run that knows of theirs: role "
            f"{main.name!r} has no torchrun or Python command. Make {role.name!r} the first role, or submit it as an "
            "app of its own"
        )
    if role.max_retries and role.retry_policy is RetryPolicy.REPLICA:
        raise ValueError(
            f"role {role.name!r} has RetryPolicy.REPLICA, and AWS Batch replaces no single node: it starts a job again "
            "as a whole (RetryPolicy.APPLICATION)"
        )
