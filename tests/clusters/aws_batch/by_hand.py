# SPDX-License-Identifier: BSD-3-Clause
"""moto's AWS with the Docker daemon that runs its jobs, for ``python -m tests.clusters``."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable

from tests.clusters.docker.daemon import Daemon, missing


def start() -> tuple[dict[str, str], Callable[[], None]]:
    """An AWS with two queues; what clients need, and what ends it.

    The image and the queue are for ``-cfg queue="$QUEUE"`` and ``--image "$IMAGE" --mounts "$MOUNTS"``.
    """
    if reason := missing():
        sys.exit(reason)
    if importlib.util.find_spec("moto") is None:
        sys.exit("moto is not installed: pip install -c constraints.txt -e '.[test,aws]'")
    from tests.clusters.aws_batch.apps import CREDENTIALS, with_docker
    from tests.clusters.aws_batch.server import QUEUES

    daemon = Daemon()
    try:
        aws = with_docker(daemon)
    except BaseException:
        daemon.stop()
        raise

    def stop() -> None:
        try:
            aws.stop()
        finally:
            daemon.stop()

    variables = {
        "AWS_ENDPOINT_URL": aws.url,
        **CREDENTIALS,
        "QUEUE": QUEUES[0],
        "DOCKER_HOST": daemon.host,
        "IMAGE": "tests:latest",
        "MOUNTS": daemon.mount_words(),
    }
    return variables, stop
