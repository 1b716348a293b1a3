# SPDX-License-Identifier: BSD-3-Clause
"""The daemon of the tests, for ``python -m tests.clusters``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from tests.clusters.docker.daemon import Daemon, missing


@contextlib.contextmanager
def running() -> Iterator[dict[str, str]]:
    """Yield what clients need of a daemon. The image is for ``--image "$IMAGE" --mounts "$MOUNTS"``."""
    if reason := missing():
        sys.exit(reason)
    daemon = Daemon()
    try:
        yield {"DOCKER_HOST": daemon.host, "IMAGE": daemon.image, "MOUNTS": daemon.mount_words()}
    finally:
        daemon.stop()
