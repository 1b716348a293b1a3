# SPDX-License-Identifier: BSD-3-Clause
"""A live allocation of host processes, without a scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torchx_monarch
from tests.local.hosts import Hosts
from tests.waits import WITHIN, until
from torchx_monarch.client.connection import Target
from torchx_monarch.client.result import RunResult


class Live(Hosts):
    """Hosts that wait for runs, on this machine.

    Attributes:
        job: what a user has of them.

    Args:
        folder: as for ``Hosts``.
        command: what a run runs that names nothing else.
        replicas: how many hosts.
        idle_timeout: seconds.
        options: further options of the host's command line.
        more: as for ``Hosts``.
    """

    def __init__(
        self,
        folder: Path,
        command: list[str],
        replicas: int = 1,
        idle_timeout: float = 60,
        options: tuple[str, ...] = ("--grace", "5", "--preload", ""),
        **more: Any,
    ) -> None:
        words = ["python", "-m", "torchx_monarch.hosts", "--idle-timeout", str(idle_timeout), "--", *command]
        super().__init__(folder, words, replicas, options, **more)
        self.job = torchx_monarch.SPMDJob("monarch_local://torchx/app", address=f"unix:{folder}/r.sock")

    def ready(self) -> Live:
        """Start them all and wait until runs can begin."""
        self.start()
        self.wait_mesh()
        return self

    def wait_mesh(self) -> None:
        """Wait until runs can begin."""

        def is_ready() -> bool:
            assert all(process.poll() is None for process in self.processes.values()), self.err()
            return self.job.status().ready

        until(is_ready, "the mesh")

    @property
    def target(self) -> Target:
        """Where replica 0 listens."""
        return Target.from_handle(self.job.handle, address=f"unix:{self.folder}/r.sock")

    def run(self, *words: str, **more: Any) -> RunResult:
        """A run that ended, its output stored, and how."""
        return self.job.run_spmd(list(words) or None, **{"output": "store", "check": False, **more})

    def end(self) -> list[int]:
        """Give them back; their exit codes."""
        from torchx_monarch.client.connection import ask

        ask(self.target, {"type": "stop"})
        return self.wait()

    def kill(self) -> None:
        """For the end of a test that may have failed."""
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            process.wait(WITHIN)
