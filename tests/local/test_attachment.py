# SPDX-License-Identifier: BSD-3-Clause
"""Attaching to worker loops that are not ready for it."""

from __future__ import annotations

import os
import select
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ports import free_port
from torchx_monarch.host import worker_loop_main as worker_loop
from torchx_monarch.model.env_names import keep_monarch_log_private
from torchx_monarch.monarch_adapter.monarch_api import _TLS_VARIABLES
from torchx_monarch.transport import credentials
from torchx_monarch.transport.address import as_ipv6
from torchx_monarch.transport.connections import Identity

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

_PATIENT_CLIENT = (
    """
import os, time
from torchx_monarch.monarch_adapter import attachment

spelled = attachment._spelled

def after_go(address, number):
    while number and not os.path.exists(os.environ["GO"]):
        time.sleep(0.01)
    return spelled(address, number)

attachment._spelled = after_go
"""
    + _CLIENT
)
"""Sends a request again once the file GO exists."""

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


def test_a_request_that_comes_back_is_sent_again(folder: Path, start: Start, eventually: Callable[..., object]) -> None:
    # A worker loop with another id sends requests back, as one that cannot deliver them yet.
    start(_WORKER, f"{worker_loop.new_service_id()}@ipc://{folder}/worker")
    wanted, ready = worker_loop.new_service_id(), f"{worker_loop.new_service_id()}@ipc://{folder}/ready"
    start(_WORKER, f"{wanted}@ipc://{folder}/wanted")
    start(_WORKER, ready)
    for each in ("worker", "wanted", "ready"):
        eventually((folder / each).exists, f"the worker loop {each}")
    client = start(_CLIENT, "60", f"{wanted}@ipc://{folder}/worker", ready)
    eventually(lambda: (folder / "err3").read_text().count("undeliverable_message") > 1, "the returned requests")
    # The other worker loop lives on: Monarch would send to its successor what it has not acknowledged.
    (folder / "wanted").rename(folder / "worker")
    assert client.wait(60) == 0
    assert (folder / "out3").read_text() == "attached\n", (folder / "err3").read_text()


def test_a_request_that_comes_back_again_and_again_is_an_error(folder: Path, start: Start) -> None:
    url = f"ipc://{folder}/worker"
    start(_WORKER, f"{worker_loop.new_service_id()}@{url}")
    client = start(_CLIENT, "3", f"{worker_loop.new_service_id()}@{url}")
    assert client.wait(60) == 0
    assert (folder / "out1").read_text() == "not in time\n", (folder / "err1").read_text()


class _Forwarder(socketserver.ThreadingTCPServer):
    """A port whose connections lead to a port that can be replaced; those that are open stay with the one before."""

    daemon_threads, block_on_close, allow_reuse_address = True, False, True
    to = 0


class _Forward(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, _Forwarder)
        with socket.create_connection(("127.0.0.1", self.server.to)) as other:
            ends = {self.request: other, other: self.request}
            while True:
                for end in select.select(list(ends), [], [])[0]:
                    data = end.recv(65536)
                    if not data:
                        return
                    ends[end].sendall(data)


@pytest.fixture
def forwarder() -> Iterator[_Forwarder]:
    with _Forwarder(("127.0.0.1", 0), _Forward) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.nightly("the spellings have a unit test; that Monarch tells them apart changes with its releases alone")
@pytest.mark.parametrize("scheme", ["tcp", "tls"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_request_that_comes_back_over_a_network_is_sent_again(
    folder: Path, start: Start, forwarder: _Forwarder, eventually: Callable[..., object], scheme: str, host: str
) -> None:
    env = {"GO": str(folder / "go")}
    if scheme == "tls":
        names = {"127.0.0.1", "localhost", as_ipv6("127.0.0.1")}
        identity = Identity.of(credentials.create()[0], names, str(folder))
        env |= dict(zip(_TLS_VARIABLES, identity.files, strict=True))
    other, wanted, url = worker_loop.new_service_id(), worker_loop.new_service_id(), f"{scheme}://{host}"
    ports = [free_port(), free_port()]
    for service, port in zip((other, wanted), ports, strict=True):
        start(_WORKER, f"{service}@{url}:{port}", url=f"{url}:0", env=env)
        eventually(lambda port=port: _answers(port), f"the worker loop on port {port}")
    forwarder.to = ports[0]
    client = start(_PATIENT_CLIENT, "60", f"{wanted}@{url}:{forwarder.server_address[1]}", url=f"{url}:0", env=env)
    eventually(lambda: "undeliverable_message" in (folder / "err2").read_text(), "the returned request")
    forwarder.to = ports[1]
    (folder / "go").touch()
    assert client.wait(60) == 0
    assert (folder / "out2").read_text() == "attached\n", (folder / "err2").read_text()
