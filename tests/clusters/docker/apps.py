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
from tests.contract.place import Place, left_to_others
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
    nightly = left_to_others(
        "test_actors_run_beside_ranks",
        "test_a_client_attaches_during_a_run",
        "spare host",
        "lost host replaced",
        "test_the_job_begins_again_when_a_host_is_lost[0]",
        "preemption",
        "test_delete_leaves_nothing[0]",
        "test_describe_gives_the_original_app",
        "test_a_log_is_followed_to_its_end",
        "test_exit_code_78_asks_for_no_restart",
        "elastic role",
        "function on hosts that stay",
        "test_a_group_restarts_alone_and_may_be_lost",
        "test_a_command_is_told_of_the_end[0]",
        "test_ranks_are_looked_at_and_debugged",
        "test_an_app_ends_when_it_is_decided_though_nobody_looks[succeeded]",
        "test_an_app_ends_when_it_is_decided_though_nobody_looks[lost]",
        "test_an_app_ends_when_it_is_decided_though_nobody_looks[failed hosts]",
        "retry policies of commands",
        "test_a_command_has_its_arguments_and_environment[False]",
    )
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
