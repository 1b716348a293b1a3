# SPDX-License-Identifier: BSD-3-Clause
"""The cluster of the tests, for ``python -m tests.clusters``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from tests.clusters.kubernetes.cluster import Cluster, missing


@contextlib.contextmanager
def running() -> Iterator[dict[str, str]]:
    """Yield what clients and further runs of the tests need of an API server with its stand-ins."""
    if reason := missing():
        sys.exit(reason)
    cluster = Cluster().up()
    kubeconfig = str(cluster.kubeconfig)
    further = {"TEST_KUBECONFIG": kubeconfig, "TEST_IMAGE": cluster.image, "TEST_KUBE_WIRE": "api-server"}
    try:
        yield {"KUBECONFIG": kubeconfig, **further}
    finally:
        cluster.down()
