# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Connect to the Docker daemon, and report to the user when it is missing or stops answering."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import docker
import requests
import urllib3
from docker.errors import DockerException

from torchx_monarch.backends.errors import BackendError

if TYPE_CHECKING:
    from docker import DockerClient


class DaemonError(BackendError):
    """The Docker daemon is missing or does not answer."""


def connect() -> DockerClient:
    """Return a client of the daemon that ``DOCKER_HOST`` names; of this machine's daemon if unset.

    Raises:
        DaemonError: the daemon cannot be reached.
    """
    try:
        return docker.from_env()
    except DockerException as error:
        raise _cli_error(
            f"there is no Docker daemon at {_where()} ({error}). Start it (systemctl start docker; Debian's package is "
            "docker.io), name another in DOCKER_HOST, or have yourself put into the group that may use it"
        ) from None


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Convert the connection errors of requests to the daemon, which may end or hang meanwhile.

    Raises:
        DaemonError: the daemon does not answer.
    """
    try:
        yield
    except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError) as error:
        raise _cli_error(
            f"the Docker daemon at {_where()} does not answer any more ({error}). What runs there may go on: ask again "
            "when it is back"
        ) from None


def lines_while_answering(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines that are read from the daemon.

    Raises:
        DaemonError: the daemon does not answer.
    """
    with answering():
        yield from lines


def _where() -> str:
    return os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")


def _cli_error(message: str) -> BaseException:
    """Return an exception that ends the torchx command with this message and no traceback.

    In other threads that is a DaemonError: Python's ``threading.excepthook`` ignores SystemExit.
    """
    is_command = os.path.basename(sys.argv[0]) == "torchx" and threading.current_thread() is threading.main_thread()
    return SystemExit(message) if is_command else DaemonError(message)
