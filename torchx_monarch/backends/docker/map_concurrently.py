# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Apply a function to many containers in parallel: dockerd takes as long for one container as for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_AT_A_TIME = 128


def map_concurrently(action: Callable[[T], R], each: Sequence[T]) -> list[R]:
    """Return the results of ``action``, in order; raise the first error, in that order, after all calls have ended."""
    if not each:
        return []
    with ThreadPoolExecutor(min(len(each), _AT_A_TIME), thread_name_prefix="docker") as pool:
        futures = [pool.submit(action, one) for one in each]
    return [future.result() for future in futures]
