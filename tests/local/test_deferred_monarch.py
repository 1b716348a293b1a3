# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The only host of a job starts Monarch when the first client connects to it, and not before."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.local.live import Live
from tests.local.other_user import abstract_sockets
from torchx_monarch.client.connection import ask
from torchx_monarch.client.target import Target
from torchx_monarch.transport import credentials, local_addresses
from torchx_monarch.transport.address import Address
from torchx_monarch.transport.connections import Identity
from torchx_monarch.transport.local_addresses import NetworkOptions

_CLIENT = """
import os, sys
from monarch.actor import Actor, attach_to_workers, enable_transport, endpoint

class Visitor(Actor):
    @endpoint
    def parent(self) -> int:
        return os.getppid()

enable_transport(sys.argv[1])
hosts = attach_to_workers(ca="trust_all_connections", workers=[sys.argv[2]], name="hosts")
hosts.initialized.get(timeout=120)
procs = hosts.spawn_procs(per_host={"gpus": 1}, name="visitors")
print("child of", procs.spawn("visitor", Visitor).parent.call_one().get(timeout=120), flush=True)
procs.stop().get(timeout=120)
os._exit(0)
"""


def has_monarch(pid: int) -> bool:
    """Whether Monarch's library is loaded in a process, or in one below it."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return any("monarch/_rust_bindings" in Path(f"/proc/{one.pid}/maps").read_text() for one in family)


@pytest.mark.parametrize("scheme", ["unix", "tls"])
def test_a_host_alone_starts_monarch_for_its_first_client(
    folder: Path, script: Callable[[str], str], scheme: str, tmp_path: Path, eventually: Callable[..., object]
) -> None:
    live = Live(folder, ["torchrun", script("print('ran')")])
    target, transport, tls = live.target, f"ipc://{folder}/c{{}}", dict[str, str]()
    if scheme == "tls":
        with local_addresses.bind_port(NetworkOptions(bind="127.0.0.1")) as free:
            port = free.getsockname()[1]
        authority, client = credentials.create()
        live.environ = {"MONARCH_RENDEZVOUS": f"tls:127.0.0.1:{port}", "MONARCH_CREDENTIALS": authority.to_text()}
        target = Target(Address("tls", "127.0.0.1", port), credentials=client.to_text())
        names = ("HYPERACTOR_TLS_CERT", "HYPERACTOR_TLS_KEY", "HYPERACTOR_TLS_CA")
        tls = dict(zip(names, Identity.of(authority, ["127.0.0.1"], str(tmp_path)).files, strict=True))
        transport = "tls://127.0.0.1:0"
    live.start()
    try:
        eventually(lambda: "mesh" in {event["kind"] for event in live.events()}, "the mesh")
        host = live.processes[0].pid
        assert scheme == "tls" or live.run().exit_code == 0
        assert not has_monarch(host) and not abstract_sockets(host)

        [worker] = [each["address"] for each in ask(target, {"type": "look"})["hosts"]]
        environ = {**os.environ, **tls, "MONARCH_LOG_SUFFIX": "to-stderr" * 32}
        for number in range(2):
            words = [sys.executable, "-c", _CLIENT, transport.format(number), worker]
            done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=120)
            assert done.stdout == f"child of {host}\n", done.stderr
        assert has_monarch(host)

        assert scheme == "tls" or live.run().exit_code == 0
        ask(target, {"type": "stop"})
        live.wait()
        assert "INSECURE" not in live.err()
    finally:
        live.kill()


def test_ranks_do_not_need_a_monarch_that_cannot_be_imported(
    folder: Path, script: Callable[[str], str], tmp_path: Path, eventually: Callable[..., object]
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "monarch.py").write_text("raise ImportError('no library')\n")
    environ = {"PYTHONPATH": str(tmp_path / "broken")}
    live = Live(folder, ["torchrun", script("print('ran')")], environ=environ).ready()
    try:
        [worker] = [each["address"] for each in ask(live.target, {"type": "look"})["hosts"]]
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(worker.partition("ipc://")[2])
        line = "host 0: Monarch cannot be started for a client: ImportError('no library')"
        eventually(lambda: line in live.err(), "the failure in the log")
        assert live.run().exit_code == 0
        assert live.end() == [0]
    finally:
        live.kill()
