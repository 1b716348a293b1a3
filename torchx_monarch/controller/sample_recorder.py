# SPDX-License-Identifier: BSD-3-Clause
"""Record what ranks use, every few seconds while they run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from torchx_monarch.controller.host_messages import SampleRanks
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.insight.sample_log import SampleLog

_EVERY = 5.0
"""Seconds between two samples."""

_PER_HOST = 0.25
"""Seconds between two samples for each host of a large job: replica 0 receives the samples of all."""

_TIMEOUT = 5.0
"""Seconds for the answers of all hosts; those of others are left out."""


class SampleRecorder:
    """Record samples of the ranks.

    Args:
        hosts: the hosts, which are asked.
        log: where they are recorded; None for nowhere.
        every: seconds between two samples.
    """

    def __init__(self, hosts: JobHosts, log: SampleLog | None, every: float = _EVERY) -> None:
        self._hosts = hosts
        self._log = log
        self._every = every

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record within this context."""
        task = asyncio.ensure_future(self._record(self._log)) if self._log is not None else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()

    async def _record(self, log: SampleLog) -> None:
        while True:
            await asyncio.sleep(max(self._every, _PER_HOST * len(self._hosts.present)))
            answers, _ = await self._hosts.collect(SampleRanks(groups=False), _TIMEOUT)
            log.append(sample for answer in answers for sample in answer.samples)
