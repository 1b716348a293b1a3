# SPDX-License-Identifier: BSD-3-Clause
"""The machines of the tests, for ``python -m tests.clusters``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from tests.clusters.ssh.machines import Machines, missing


@contextlib.contextmanager
def running() -> Iterator[dict[str, str]]:
    """Yield what clients need of three machines, m1 to m3."""
    if reason := missing():
        sys.exit(reason)
    machines = Machines(3)
    try:
        yield machines.up().environ
    finally:
        machines.down()
