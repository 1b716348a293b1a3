# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The connection to the Docker daemon, and what a person is told when there is none, or none any more."""

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

if TYPE_CHECKING:
    from docker import DockerClient


class DaemonError(RuntimeError):
    """There is no Docker daemon to talk to."""


def connect() -> DockerClient:
    """A client of the daemon that ``DOCKER_HOST`` names, or of this machine's.

    Raises:
        DaemonError: there is none.
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
    """For what asks the daemon; it may end meanwhile, or hang.

    Raises:
        DaemonError: it does not answer.
    """
    try:
        yield
    except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError) as error:
        raise _cli_error(
            f"the Docker daemon at {_where()} does not answer any more ({error}). What runs there may go on: ask again "
            "when it is back"
        ) from None


def lines_while_answering(lines: Iterable[str]) -> Iterator[str]:
    """Lines that are read from the daemon.

    Raises:
        DaemonError: it does not answer.
    """
    with answering():
        yield from lines


def _where() -> str:
    return os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")


def _cli_error(message: str) -> BaseException:
    """What ends the torchx command with this message and no traceback; in a thread of it nobody would see that."""
    is_command = os.path.basename(sys.argv[0]) == "torchx" and threading.current_thread() is threading.main_thread()
    return SystemExit(message) if is_command else DaemonError(message)
