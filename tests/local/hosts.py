# SPDX-License-Identifier: BSD-3-Clause
"""Runs host processes directly, without a scheduler, as any backend would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import loop_watch
from tests.fork_server import Forked, ForkServer, server
from tests.waits import WITHIN
from torchx_monarch.client import hosts as client_hosts

NO_PRELOAD = ("--grace", "5", "--preload", "")
"""Options for programs without torch: to import it is most of a launch."""


def torchrun(*words: str, nproc: int = 2, nnodes: int = 1, restarts: int = 0) -> list[str]:
    """Return a command of ranks, each of whose lines tells which it is of."""
    sizes = ["--nproc-per-node", str(nproc), "--nnodes", str(nnodes), "--max-restarts", str(restarts)]
    return ["torchrun", *sizes, "--role", "trainer", "--tee", "3", *words]


class Hosts:
    """The replicas of one role, on this machine. Changes of ``environ`` count for those started from then on.

    They are forks of a process that has imported the host's modules, unless a wrapper or their environment needs new
    interpreters; tests of backends start all of theirs as ``python -m torchx_monarch.host``.

    Args:
        folder: for sockets, logs and events; short.
        replicas: how many.
        options: further options of the host's command line.
        environ: beside this process's environment.
        wrapper: words before the command of every host.
        within: words before those, by replica: what puts it into a network of its own. May be changed.
    """

    def __init__(
        self,
        folder: Path,
        command: list[str],
        replicas: int = 1,
        options: tuple[str, ...] = ("--grace", "5"),
        environ: dict[str, str] | None = None,
        wrapper: tuple[str, ...] = (),
        within: dict[int, tuple[str, ...]] | None = None,
    ) -> None:
        self.folder = folder
        self.replicas = replicas
        self._wrapper = wrapper
        self._rest = ["--replicas", str(replicas), *options, "--", *command]
        self.environ = dict(environ or {})
        self.within = dict(within or {})
        self.processes: dict[int, subprocess.Popen[bytes] | Forked] = {}

    def start(self, *which: int) -> Hosts:
        """Start the given replicas, or all."""
        for replica in which or range(self.replicas):
            logs = self.logs(replica)
            logs.mkdir(parents=True, exist_ok=True)
            env = {
                **os.environ,
                "MONARCH_RUN_DIR": str(self.folder),
                "MONARCH_RENDEZVOUS": f"unix:{self.folder}/r.sock",
                "MONARCH_EVENTS": str(self.folder / "events.jsonl"),
                "MONARCH_LOG_DIR": str(logs),
                "TORCHELASTIC_ERROR_FILE": str(logs / "error.json"),
                **self.environ,
            }
            before = (*self.within.get(replica, ()), *self._wrapper)
            words = ["--app", "app", "--role", "trainer", "--replica", str(replica), *self._rest]
            with open(logs / "out", "ab") as out, open(logs / "err", "ab") as err:
                if not before and ForkServer.fits(env):
                    streams = os.devnull, out.name, err.name
                    env[loop_watch.VARIABLE] = str(self.folder / loop_watch.FILE)
                    self.processes[replica] = server("host").start(words, env, os.getcwd(), *streams)
                    continue
                self.processes[replica] = subprocess.Popen(
                    [*before, sys.executable, "-m", "torchx_monarch.host", *words],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
        return self

    def lose(self, *which: int) -> None:
        """Kill the processes of replicas."""
        for replica in which:
            self.processes[replica].kill()
        for replica in which:
            self.processes[replica].wait(WITHIN)

    def stop(self) -> list[int]:
        """Send all of them SIGTERM; exit codes of the replicas, by id."""
        for process in self.processes.values():
            process.terminate()
        return self.wait()

    @property
    def client(self) -> client_hosts.Hosts:
        """They, as a client asks them."""
        return client_hosts.Hosts("monarch_local://torchx/app", address=f"unix:{self.folder}/r.sock")

    def wait(self, timeout: float = WITHIN) -> list[int]:
        """Exit codes of the replicas that were started, by id."""
        return [self.processes[replica].wait(timeout) for replica in sorted(self.processes)]

    def logs(self, replica: int) -> Path:
        """The folder of a replica's logs."""
        return self.folder / "logs" / str(replica)

    def out(self, replica: int = 0) -> str:
        """What a replica has printed to stdout."""
        return (self.logs(replica) / "out").read_text()

    def err(self, replica: int = 0) -> str:
        """What a replica has printed to stderr."""
        return (self.logs(replica) / "err").read_text()

    def events(self) -> list[dict[str, Any]]:
        """The events so far."""
        path = self.folder / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def rank_pids(self) -> list[int]:
        """Processes of all ranks that print ``pid N``."""
        words = " ".join(self.out(replica) for replica in self.processes).split()
        return [int(words[at + 1]) for at, word in enumerate(words) if word.endswith("pid") and at + 1 < len(words)]
