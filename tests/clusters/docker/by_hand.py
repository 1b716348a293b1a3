# SPDX-License-Identifier: BSD-3-Clause
"""The daemon of the tests, for ``python -m tests.clusters``."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tests.clusters.docker.daemon import Daemon, missing


def start() -> tuple[dict[str, str], Callable[[], None]]:
    """A daemon; what clients need, and what ends it. The image is for ``--image "$IMAGE" --mounts "$MOUNTS"``."""
    if reason := missing():
        sys.exit(reason)
    daemon = Daemon()
    return {"DOCKER_HOST": daemon.host, "IMAGE": daemon.image, "MOUNTS": daemon.mount_words()}, daemon.stop
