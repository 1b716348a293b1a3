# SPDX-License-Identifier: BSD-3-Clause
"""The cluster of the tests, for ``python -m tests.clusters``."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tests.clusters.kubernetes.cluster import Cluster, missing


def start() -> tuple[dict[str, str], Callable[[], None]]:
    """An API server with its stand-ins; what clients and further runs of the tests need, and what ends it."""
    if reason := missing():
        sys.exit(reason)
    cluster = Cluster().up()
    kubeconfig = str(cluster.kubeconfig)
    further = {"TEST_KUBECONFIG": kubeconfig, "TEST_IMAGE": cluster.image, "TEST_KUBE_WIRE": "api-server"}
    return {"KUBECONFIG": kubeconfig, **further}, cluster.down
