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

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


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


async def both(
    pair: tuple[socket.socket, socket.socket], server: ssl.SSLContext | None, client: ssl.SSLContext | None
) -> tuple[Streams, Streams]:
    """Open streams at both ends."""
    return await asyncio.gather(
        open_streams({"sock": pair[0]}, server, None, 60.0), open_streams({"sock": pair[1]}, client, _NAME, 60.0)
    )


@pytest.mark.parametrize("tls", [True, False])
def test_data_passes_both_ways_to_the_end(
    pair: tuple[socket.socket, socket.socket], identity: Identity, tls: bool
) -> None:
    contexts = [identity.context(server=server) if tls else None for server in (True, False)]
    much = bytes(range(256)) * 10_000  # more than the buffers of the sockets and one TLS record hold

    async def run() -> None:
        (reader, writer), (peer_reader, peer_writer) = await both(pair, *contexts)
        assert bool(writer.get_extra_info("peercert")) == tls
        for sends, receives in ((writer, peer_reader), (peer_writer, reader)):
            sends.write(much)
            received, _ = await asyncio.wait_for(asyncio.gather(receives.readexactly(len(much)), sends.drain()), 60)
            assert received == much
        writer.close()
        assert await asyncio.wait_for(peer_reader.read(), 60) == b""
        peer_writer.close()
        for stream in (writer, peer_writer):
            await asyncio.wait_for(stream.wait_closed(), 60)

    asyncio.run(run())
    assert all(end.fileno() == -1 for end in pair)


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
