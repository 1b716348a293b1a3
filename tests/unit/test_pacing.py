# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A function that is called at most once in a time."""

from __future__ import annotations

import asyncio

from tests.waits import until_async
from torchx_monarch.controller.pacing import Paced


def test_calls_at_once_and_then_once_for_all() -> None:
    async def main() -> None:
        calls: list[int] = []
        paced = Paced(lambda: calls.append(len(calls)), 0.05)
        for _ in range(100):
            paced()
        assert calls == [0]
        await until_async(lambda: len(calls) >= 2, "the second call")
        await asyncio.sleep(0.1)
        assert calls == [0, 1]
        paced()
        assert calls == [0, 1, 2]

    asyncio.run(main())
