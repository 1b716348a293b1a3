# SPDX-License-Identifier: BSD-3-Clause
"""Ask the hosts of a running job what its ranks do."""

from __future__ import annotations

import time

from torchx_monarch.insight.rank_activity import RankActivity, activity
from torchx_monarch.insight.rank_sample import RankSample

_APART = 1.0
"""Seconds between the two samples of which rates are computed."""

_PATIENCE = 3.0
"""Seconds to wait for the connection to replica 0, and again for its answer."""


class SampledRanks:
    """Ask for samples of the ranks of a job, and keep the last ones for the next look."""

    def __init__(self, handle: str) -> None:
        self._handle = handle
        self._last: list[RankSample] = []

    def sample(self, role: str) -> list[RankActivity] | None:
        """Return what each rank of a role does; None if the hosts cannot be reached or there are no ranks.

        The first look takes ``_APART`` seconds.
        """
        if not self._last:
            self._last = self._take(role)
            if not self._last:
                return None
            time.sleep(_APART)
        before, self._last = self._last, self._take(role)
        return activity(self._last, before) if self._last else None

    def _take(self, role: str) -> list[RankSample]:
        from torchx_monarch.client.rank_samples import samples_at
        from torchx_monarch.client.target import Target
        from torchx_monarch.exceptions import RefusedError, UnreachableError

        try:
            return samples_at(Target.of(self._handle, role), _PATIENCE)[0]
        except (UnreachableError, RefusedError, TimeoutError):
            return []
