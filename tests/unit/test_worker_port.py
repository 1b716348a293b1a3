# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The address and the port of a worker loop before Monarch runs."""

from __future__ import annotations

import asyncio
import socket
import stat
from pathlib import Path

import pytest

from torchx_monarch.monarch_adapter.worker_port import WorkerPort, new_service_id


def test_monarch_prints_service_ids_as_they_are() -> None:
    from monarch.actor import Uid

    ids = {new_service_id() for _ in range(1000)} | {"service<ZZZZZZZZZZ>"}
    assert len(ids) == 1001
    assert [str(Uid.from_string(each)) for each in ids] == list(ids)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)  # a path of a socket has a maximum length
    return "worker"


def test_the_first_client_of_a_socket_file_is_noticed_and_the_file_is_gone(path: str) -> None:
    async def client() -> bytes:
        port = WorkerPort(f"{new_service_id()}@ipc://{path}")
        noticed = asyncio.ensure_future(port.client_connected())
        await asyncio.sleep(0)
        assert not noticed.done()
        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
        reader, writer = await asyncio.open_unix_connection(path)
        await asyncio.wait_for(noticed, 10)
        assert not Path(path).exists()
        writer.close()
        return await asyncio.wait_for(reader.read(), 10)

    with pytest.raises(ConnectionResetError):
        asyncio.run(client())


def test_the_connection_of_the_first_client_of_a_tcp_port_waits_for_monarch() -> None:
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    address, descriptor = bound.getsockname(), bound.detach()

    async def notice() -> None:
        port = WorkerPort(f"{new_service_id()}@tls://node0:fd{descriptor}")
        client.connect(address)
        client.sendall(b"hello")
        await asyncio.wait_for(port.client_connected(), 10)

    with socket.socket() as client:
        asyncio.run(notice())
        with socket.socket(fileno=descriptor) as listener:
            listener.settimeout(10)
            with listener.accept()[0] as connection:
                connection.settimeout(10)
                assert connection.recv(10) == b"hello"
