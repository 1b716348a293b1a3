# SPDX-License-Identifier: BSD-3-Clause
"""Leases: who counts as lost, and who does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tests.waits import until_async
from torchx_monarch.transport import lease
from torchx_monarch.transport.lease import Leases


@pytest.fixture
def stop_this_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let 2.5 s pass at once, as SIGSTOP does it."""
    stopped = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(stopped))
    monkeypatch.setattr(lease, "time", clock)
    return lambda: stopped.append(2.5)


def test_time_in_which_this_process_has_not_run_does_not_count(stop_this_process: Callable[[], None]) -> None:
    async def main() -> None:
        expired: list[str] = []
        leases: Leases[str] = Leases(1.0, expired.append)
        leases.start()
        leases.renew("peer")
        assert leases.own_pause == 0
        stop_this_process()
        await until_async(lambda: leases._silence["peer"], "the look that was due")
        assert not expired
        assert leases.own_pause > 2.0
        leases.stop()

    asyncio.run(main())
