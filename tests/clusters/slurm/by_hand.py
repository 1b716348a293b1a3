# SPDX-License-Identifier: BSD-3-Clause
"""The cluster of the tests, for ``python -m tests.clusters``."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tests.clusters.slurm.cluster import SlurmCluster, missing


def start() -> tuple[dict[str, str], Callable[[], None]]:
    """Four nodes; what clients need, and what ends them."""
    if reason := missing():
        sys.exit(reason)
    cluster = SlurmCluster(4)
    try:
        cluster.up()
    except BaseException:
        cluster.down()
        raise
    return {"SLURM_CONF": str(cluster.conf)}, cluster.down
