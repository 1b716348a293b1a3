# SPDX-License-Identifier: BSD-3-Clause
"""Count the retries that an app has left, and delay them, for the backends that restart replicas themselves.

A replica that fails is restarted while its role has retries left: alone (REPLICA), with its role (ROLE), or with the
whole app (APPLICATION). The count is per replica, per role, per app (``max_retries`` of torchx.specs.Role). Standard
library only: the local supervisor and Slurm's batch step import this module.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from torchx_monarch.model.backoff import Backoff
from torchx_monarch.model.role_spec import RetryPolicy, RoleSpec

_AWAITED = 30.0
"""The longest delay in seconds of a single host, for which the others wait ``--rejoin-timeout``: 60 s by default."""


class RetryBudget:
    """The retries that an app has left.

    Args:
        app_retries: how often the app was restarted already.
    """

    def __init__(self, app_retries: int = 0) -> None:
        self._used: Counter[tuple[str, int]] = Counter({("", 0): app_retries})
        self._backoffs = defaultdict[tuple[str, int], Backoff](Backoff)

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
        scope = _scope(role, replica)
        if self._used[scope] >= role.max_retries:
            return False
        self._used[scope] += 1
        return True

    def delay(self, role: RoleSpec, lived: float, replica: int = 0) -> float:
        """Return the seconds that a retry waits which was taken (``Backoff.delay``).

        Args:
            role: as for ``take``.
            lived: seconds for which the failed replica, or role, ran.
            replica: as for ``take``.
        """
        delay = self._backoffs[_scope(role, replica)].delay(lived)
        return min(delay, _AWAITED) if role.runs_hosts and role.retry_policy is RetryPolicy.REPLICA else delay


def _scope(role: RoleSpec, replica: int) -> tuple[str, int]:
    """Return what starts again together, and is counted together."""
    return {
        RetryPolicy.REPLICA: (role.name, replica),
        RetryPolicy.ROLE: (role.name, -1),
        RetryPolicy.APPLICATION: ("", 0),
    }[role.retry_policy]
