# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The same done to many containers at a time: dockerd takes as long for one as for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_AT_A_TIME = 128


def together(action: Callable[[T], R], each: Sequence[T]) -> list[R]:
    """What ``action`` returns for each, in order; the first error of any is raised when all have been tried."""
    if not each:
        return []
    with ThreadPoolExecutor(min(len(each), _AT_A_TIME), thread_name_prefix="docker") as pool:
        futures = [pool.submit(action, one) for one in each]
    return [future.result() for future in futures]
