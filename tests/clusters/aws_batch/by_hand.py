# SPDX-License-Identifier: BSD-3-Clause
"""moto's AWS with the Docker daemon that runs its jobs, for ``python -m tests.clusters``."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator

from tests.clusters.docker.daemon import Daemon, missing


@contextlib.contextmanager
def running() -> Iterator[dict[str, str]]:
    """Yield what clients need of an AWS with two queues.

    The image and the queue are for ``-cfg queue="$QUEUE"`` and ``--image "$IMAGE" --mounts "$MOUNTS"``.
    """
    if reason := missing():
        sys.exit(reason)
    if importlib.util.find_spec("moto") is None:
        sys.exit("moto is not installed: pip install -c constraints.txt -e '.[test,aws]'")
    from tests.clusters.aws_batch.apps import CREDENTIALS, with_docker
    from tests.clusters.aws_batch.server import QUEUES

    with contextlib.ExitStack() as stack:
        daemon = Daemon()
        stack.callback(daemon.stop)
        aws = with_docker(daemon)
        stack.callback(aws.stop)
        image = {"DOCKER_HOST": daemon.host, "IMAGE": "tests:latest", "MOUNTS": daemon.mount_words()}
        yield {"AWS_ENDPOINT_URL": aws.url, **CREDENTIALS, "QUEUE": QUEUES[0], **image}
