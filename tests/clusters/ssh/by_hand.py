# SPDX-License-Identifier: BSD-3-Clause
"""The machines of the tests, for ``python -m tests.clusters``."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tests.clusters.ssh.machines import Machines, missing


def start() -> tuple[dict[str, str], Callable[[], None]]:
    """Three machines, m1 to m3; what clients need, and what ends them."""
    if reason := missing():
        sys.exit(reason)
    machines = Machines(3)
    try:
        machines.up()
    except BaseException:
        machines.down()
        raise
    return machines.environ, machines.down
