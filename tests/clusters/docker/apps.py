# SPDX-License-Identifier: BSD-3-Clause
"""Apps on monarch_docker, through TorchX's Runner here, and through its command in processes of their own."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torchx.specs import Resource

from tests.clusters.docker.daemon import Daemon, mount_words
from tests.contract.place import Place
from tests.network.namespaces import entered
from torchx_monarch.schedulers import monarch_docker

NAME = "monarch_docker"


class Apps(Place):
    """A Docker daemon.

    Args:
        daemon: where they run.
        folder: where programs are written; every container sees it.
    """

    name = NAME
    factory = staticmethod(monarch_docker)
    own_bad_options = (({"innit": False}, "(?s)innit.*init"),)
    request_function = "requests.sessions:Session.request"
    package = "docker"
    install = "pip install 'docker>=7'"
    resource = Resource(cpu=-1, gpu=0, memMB=-1)

    def __init__(self, daemon: Daemon, folder: Path) -> None:
        self.daemon = daemon
        self.image = daemon.image
        self.mounts = daemon.mounts(folder)
        super().__init__(folder)

    @contextlib.contextmanager
    def reached(self, handle: str) -> Iterator[str]:
        """Enter the network in which the daemon has its bridge."""
        with entered(f"/proc/{self.daemon.first}/ns/net"):
            yield ""

    def client(self, handle: str) -> tuple[Sequence[str], str]:
        """Enter the network in which the daemon has its bridge."""
        return ("nsenter", f"--net=/proc/{self.daemon.first}/ns/net"), ""

    def component_words(self) -> Sequence[str]:
        """Return options of ``monarch.spmd``: memory for a torch that is built for GPUs, and this machine's folders."""
        return ("--memMB", "6000", "--image", self.daemon.image, "--mounts", mount_words(self.mounts))

    def is_read(self, *request: Any) -> bool:
        """Return whether a request of the client's changes nothing."""
        return bool(request[1].upper() in ("GET", "HEAD"))

    def lose(self, handle: str, replica: int) -> None:
        """Kill the container."""
        self.daemon.kill(self.hostname(handle, replica))

    def preempt(self, handle: str, replica: int) -> None:
        """Send the container SIGTERM, as when its machine shuts down."""
        self.daemon.kill(self.hostname(handle, replica), "TERM")

    @contextlib.contextmanager
    def pending(self) -> Iterator[str]:
        """Have a container wait for its next start."""
        yield self.run(self.role("sh", "-c", "exit 3", max_retries=50))

    def credentials(self, handle: str) -> tuple[str, str]:
        """Return the credentials, which are in the containers' environment alone, and all else of a container."""
        with contextlib.closing(self.daemon.client()) as client:
            about = client.containers.get(self.hostname(handle, 0)).attrs
        given = dict(word.split("=", 1) for word in about["Config"].pop("Env"))
        return given["MONARCH_CREDENTIALS"], json.dumps(about)

    def left(self, handle: str) -> Sequence[object]:
        """Return the objects of the daemon that are ours."""
        return list(self.daemon.left())
