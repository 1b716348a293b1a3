# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Count the retries that an app has left, for the backends that restart replicas themselves.

A replica that fails is restarted while its role has retries left: alone (REPLICA), with its role (ROLE), or with the
whole app (APPLICATION). The count is per replica, per role, per app (``max_retries`` of torchx.specs.Role). Standard
library only: the local supervisor and Slurm's batch step import this module.
"""

from __future__ import annotations

from collections import Counter

from torchx_monarch.model.role_spec import RetryPolicy, RoleSpec


class RetryBudget:
    """The retries that an app has left.

    Args:
        app_retries: how often the app was restarted already.
    """

    def __init__(self, app_retries: int = 0) -> None:
        self._used: Counter[tuple[str, int]] = Counter({("", 0): app_retries})

    @property
    def app_retries(self) -> int:
        """How often the app was restarted."""
        return self._used["", 0]

    def take(self, role: RoleSpec, replica: int = 0) -> bool:
        """Use one retry of a role's policy; return False if none is left.

        Args:
            role: the role of the failed replica.
            replica: id of that replica.
        """
        scope = {
            RetryPolicy.REPLICA: (role.name, replica),
            RetryPolicy.ROLE: (role.name, -1),
            RetryPolicy.APPLICATION: ("", 0),
        }[role.retry_policy]
        if self._used[scope] >= role.max_retries:
            return False
        self._used[scope] += 1
        return True
