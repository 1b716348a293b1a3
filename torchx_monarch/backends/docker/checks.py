# SPDX-License-Identifier: BSD-3-Clause
"""Check the Docker daemon for ``torchx monarch doctor``."""

from __future__ import annotations

import os
from collections.abc import Iterator

from torchx_monarch.backends.docker.native import Daemon, answering
from torchx_monarch.model.check_result import CheckResult, check


def check_daemon(daemon: Daemon) -> Iterator[CheckResult]:
    """Check that a daemon answers and can run this package's images.

    Raises:
        DaemonError: the daemon cannot be reached, or refuses.
    """
    with answering():
        info = daemon.client.info()
    where = os.environ.get("DOCKER_HOST") or "this machine"
    system = info.get("OSType", "linux")
    advice = f"its containers are for {system}; name a daemon for Linux in DOCKER_HOST" if system != "linux" else ""
    yield check("Docker", f"{info.get('ServerVersion', 'unknown version')} at {where}", fail=advice)
