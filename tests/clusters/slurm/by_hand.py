# SPDX-License-Identifier: BSD-3-Clause
"""The cluster of the tests, for ``python -m tests.clusters``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from tests.clusters.slurm.cluster import SlurmCluster, missing


@contextlib.contextmanager
def running() -> Iterator[dict[str, str]]:
    """Yield what clients need of four nodes."""
    if reason := missing():
        sys.exit(reason)
    cluster = SlurmCluster(4)
    try:
        cluster.up()
        yield {"SLURM_CONF": str(cluster.conf)}
    finally:
        cluster.down()
