# SPDX-License-Identifier: BSD-3-Clause
"""Attaching to worker loops that are not ready for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.waits import WITHIN, until
from torchx_monarch.host import worker_loop_main as worker_loop
from torchx_monarch.model.env_names import keep_monarch_log_private

_WORKER = """
import sys
from monarch import actor

actor.enable_transport(sys.argv[1])
actor.run_worker_loop_until_shutdown(ca="trust_all_connections", address=sys.argv[2])
"""

_CLIENT = """
import os, sys
from monarch import actor
from torchx_monarch.monarch_adapter.attachment import attach

actor.unhandled_fault_hook = lambda failure: print("a fault:", failure)
actor.enable_transport(sys.argv[1])
try:
    attach("hosts", sys.argv[3:], float(sys.argv[2]))
    print("attached")
except TimeoutError:
    print("not in time")
sys.stdout.flush()
os._exit(0)
"""

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Start a program with these arguments: ``start(program, *arguments)``; its output goes to files of the folder."""
    processes: list[subprocess.Popen[bytes]] = []

    def one(program: str, *arguments: str, url: str = "", env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        url = url or f"ipc://{folder}/client{len(processes)}"
        with (folder / f"out{len(processes)}").open("wb") as out, (folder / f"err{len(processes)}").open("wb") as err:
            command = [sys.executable, "-c", program, url, *arguments]
            environ = {**os.environ, **(env or {})}
            keep_monarch_log_private(environ)
            processes.append(subprocess.Popen(command, stdout=out, stderr=err, env=environ))
        return processes[-1]

    yield one
    for process in processes:
        process.kill()
        process.wait()


def test_a_request_that_comes_back_is_sent_again(folder: Path, start: Start) -> None:
    # A worker loop with another id sends requests back, as one that cannot deliver them yet.
    start(_WORKER, f"{worker_loop.new_service_id()}@ipc://{folder}/worker")
    wanted, ready = worker_loop.new_service_id(), f"{worker_loop.new_service_id()}@ipc://{folder}/ready"
    start(_WORKER, f"{wanted}@ipc://{folder}/wanted")
    start(_WORKER, ready)
    for name in ("worker", "wanted", "ready"):
        until((folder / name).exists, f"the worker loop {name}")
    client = start(_CLIENT, "60", f"{wanted}@ipc://{folder}/worker", ready)
    until(lambda: (folder / "err3").read_text().count("undeliverable_message") > 1, "the returned requests")
    # The other worker loop lives on: Monarch would send to its successor what it has not acknowledged.
    (folder / "wanted").rename(folder / "worker")
    assert client.wait(WITHIN) == 0
    assert (folder / "out3").read_text() == "attached\n", (folder / "err3").read_text()


def test_a_request_that_comes_back_again_and_again_is_an_error(folder: Path, start: Start) -> None:
    url = f"ipc://{folder}/worker"
    start(_WORKER, f"{worker_loop.new_service_id()}@{url}")
    client = start(_CLIENT, "3", f"{worker_loop.new_service_id()}@{url}")
    assert client.wait(WITHIN) == 0
    assert (folder / "out1").read_text() == "not in time\n", (folder / "err1").read_text()
