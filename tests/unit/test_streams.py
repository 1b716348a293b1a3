# SPDX-License-Identifier: BSD-3-Clause
"""Streams over a connected socket, with TLS and without, and what becomes of the socket when there are none."""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import contextlib
import random
import socket
import ssl
from pathlib import Path

import pytest

from torchx_monarch.transport import credentials
from torchx_monarch.transport.connections import Identity
from torchx_monarch.transport.messages import open_streams

_NAME = "node7"
_LIMIT = 1 << 16


@pytest.fixture
def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets; the test that opens streams over them closes them."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    return ends


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    return Identity.from_credentials(credentials.create()[0], {_NAME}, str(tmp_path))


def test_a_failed_handshake_closes_the_socket(pair: tuple[socket.socket, socket.socket], identity: Identity) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    client = context.wrap_bio(incoming, outgoing)  # without a certificate

    async def run() -> None:
        loop = asyncio.get_running_loop()
        opening = asyncio.ensure_future(open_streams({"sock": pair[0]}, identity.context(server=True), None, 60.0))
        while not opening.done():
            try:
                client.read(1) if client.version() else client.do_handshake()
            except ssl.SSLWantReadError:
                if data := outgoing.read():
                    await loop.sock_sendall(pair[1], data)
                incoming.write(await asyncio.wait_for(loop.sock_recv(pair[1], _LIMIT), 60))
        with pytest.raises(ssl.SSLError):
            await opening
        with contextlib.suppress(ConnectionResetError):
            while await asyncio.wait_for(loop.sock_recv(pair[1], _LIMIT), 60):
                continue

    asyncio.run(run())
    assert pair[0].fileno() == -1
    pair[1].close()


_MALFORMED = 400

_RANDOM = random.Random(1)


def damaged(data: bytes) -> bytes:
    """The same with one bit turned, cut off, or with noise at the end or in place of it."""
    kind, at = _RANDOM.randrange(4), _RANDOM.randrange(len(data))
    if kind == 0:
        return data[:at] + bytes([data[at] ^ 1 << _RANDOM.randrange(8)]) + data[at + 1 :]
    return (data[:at], data[:at] + _RANDOM.randbytes(300), _RANDOM.randbytes(_RANDOM.randrange(1, 2000)))[kind - 1]


async def attempt(end: socket.socket, context: ssl.SSLContext, damage: int) -> None:
    """Try a handshake as a client, of which one flight of bytes is damaged; 0 is the first."""
    loop = asyncio.get_running_loop()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname=_NAME)
    with contextlib.suppress(OSError), end:
        for flight in range(2):
            with contextlib.suppress(ssl.SSLWantReadError):
                client.do_handshake()
            data = outgoing.read()
            await loop.sock_sendall(end, damaged(data) if flight == damage else data)
            if flight in (damage, 1):
                break
            incoming.write(await loop.sock_recv(end, _LIMIT))
        end.shutdown(socket.SHUT_WR)
        while await loop.sock_recv(end, _LIMIT):
            pass


def test_no_damaged_handshake_is_accepted(identity: Identity) -> None:
    server, client = identity.context(server=True), identity.context(server=False)
    # Without the record ChangeCipherSpec, which is sent for middleboxes and which no TLS 1.3 server looks into.
    client.options &= ~ssl.OP_ENABLE_MIDDLEBOX_COMPAT

    async def run(damage: int) -> str:
        ends = socket.socketpair()
        for end in ends:
            end.setblocking(False)
        trying = asyncio.ensure_future(attempt(ends[1], client, damage))
        try:
            _, writer = await open_streams({"sock": ends[0]}, server, None, 60.0)
        except OSError:
            await asyncio.wait_for(trying, 60)
            assert ends[0].fileno() == -1
            return "refused"
        await asyncio.wait_for(trying, 60)
        writer.transport.abort()
        return "accepted"

    async def all_of_them() -> list[str]:
        return [await run(-1), *[await run(number % 2) for number in range(_MALFORMED)]]

    assert asyncio.run(all_of_them()) == ["accepted", *["refused"] * _MALFORMED]


def test_closes_the_socket_when_it_is_cancelled(pair: tuple[socket.socket, socket.socket], identity: Identity) -> None:
    async def run() -> None:
        with pytest.raises(asyncio.TimeoutError):  # the peer is silent
            await asyncio.wait_for(open_streams({"sock": pair[0]}, identity.context(server=True), None, 60.0), 0.1)
        assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(pair[1], 1), 60) == b""

    asyncio.run(run())
    assert pair[0].fileno() == -1
    pair[1].close()


def test_connections_of_others_in_the_process_are_as_asyncio_has_them() -> None:
    assert asyncio.sslproto.SSLProtocol.__module__ == "asyncio.sslproto"
    assert asyncio.sslproto.SSLProtocol.__name__ == "SSLProtocol"
