# SPDX-License-Identifier: BSD-3-Clause
"""Messages and streams: short ones, long ones, what is neither; and data classes of JSON that may hold anything."""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import contextlib
import random
import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from torchx_monarch.client.connection import Connection, Target
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.exceptions import UnreachableError
from torchx_monarch.model import codec
from torchx_monarch.transport import credentials, messages
from torchx_monarch.transport.address import Address
from torchx_monarch.transport.connections import Identity
from torchx_monarch.transport.messages import open_streams

LONG = {"type": "run", "program": ["x" * 100_000 for _ in range(20)]}
"""As long as Linux lets a command be."""


def received(data: bytes) -> list[Any]:
    """What another end receives that reads lines of at most ``MAX_LINE``."""

    async def main() -> list[Any]:
        reader = asyncio.StreamReader(limit=messages.MAX_LINE)
        reader.feed_data(data)
        reader.feed_eof()
        found = []
        while (message := await messages.receive(reader, 5.0)) is not None:
            found.append(message)
        return found

    return asyncio.run(main())


def test_messages_of_any_length_arrive() -> None:
    short: dict[str, Any] = {"type": "state"}
    assert received(b"".join(map(messages.encode, (short, LONG, short)))) == [short, LONG, short]
    assert received(messages.encode(LONG)[:-1]) == []  # the connection ended before it was complete


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"x" * (messages.MAX_LINE + 1) + b"\n", "a line is over the limit of 65536 bytes"),
        (b'{"frame":8388609}\n', "a message of 8388609 bytes is over the limit of 8388608 bytes"),
        (b'{"frame":-1}\n', "a message of -1 bytes is over"),
        (b'{"frame":"all"}\n', "a message of all bytes is over"),
        (b'{"frame":3}\n[]\n', "not a JSON object"),
    ],
)
def test_says_what_is_no_message(data: bytes, why: str) -> None:
    with pytest.raises(messages.ProtocolError, match=why):
        received(data)


def test_a_message_over_the_limit_is_not_sent() -> None:
    with pytest.raises(messages.ProtocolError, match="bytes is over the limit of 8388608 bytes"):
        messages.encode({"type": "x" * messages.MAX_MESSAGE})


def test_replica_0_names_the_limit_that_a_greeting_is_over(address: Address) -> None:
    async def main() -> Any:
        rendezvous = Rendezvous(HostNetwork(address))
        await rendezvous.start()
        reader, writer = await asyncio.open_unix_connection(address.path)
        writer.write(b'{"type":"' + b"x" * 70_000 + b'"}\n')
        answer = await messages.receive(reader, 20.0)
        writer.close()
        rendezvous.network.close()
        return answer

    assert asyncio.run(main())["reason"] == "a line is over the limit of 65536 bytes"


def test_a_client_says_that_its_request_is_too_long(address: Address) -> None:
    why = "the request is too long: a message of .* the limit of 8388608 bytes"
    with socket.create_server(address.path, family=socket.AF_UNIX), pytest.raises(UnreachableError, match=why):
        Connection.open(Target(address), {"type": "run", "program": ["x" * messages.MAX_MESSAGE]})
    Path(address.path).unlink()


class Point(NamedTuple):
    x: int
    y: int = 0


@dataclass
class Inner:
    name: str
    ratio: float = 1.0
    time: codec.Seconds | None = None


@dataclass
class Outer:
    inner: Inner
    many: list[Inner] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    code: int | None = None
    anything: Any = None
    point: Point = Point(0)
    flag: bool = False


def test_values_of_the_stated_types_are_taken() -> None:
    data = {
        "inner": {"name": "a", "ratio": 2, "time": 3, "newer": 1},
        "many": [{"name": "b"}],
        "env": {"A": "1"},
        "code": None,
        "anything": [1],
        "point": {"x": 1},
        "flag": True,
    }
    expected = Outer(Inner("a", 2.0, 3.0), [Inner("b")], {"A": "1"}, None, [1], Point(1), True)
    assert codec.decode(Outer, data) == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "the whole is \\[\\], not an object"),
        ({}, "the object lacks 'inner'"),
        ({"inner": {}}, "inner lacks 'name'"),
        ({"inner": {"name": 3}}, "name is 3, not str"),
        ({"inner": {"name": "a", "ratio": float("nan")}}, "ratio is nan, not a finite number"),
        (
            {"inner": {"name": "a", "time": 1e300}},
            "time is 1e\\+300, not a number of seconds, at most 1e\\+11 \\| None",
        ),
        ({"inner": {"name": "a", "time": -2e11}}, "time is -2"),
        ({"inner": {"name": "a", "ratio": "1"}}, "ratio is '1', not a finite number"),
        ({"inner": {"name": "a", "ratio": 10**400}}, "ratio is 1000"),
        ({"inner": {"name": "a"}, "many": {}}, "many is {}, not a list"),
        ({"inner": {"name": "a"}, "many": [{"name": "b"}, 1]}, "many is 1, not an object"),
        ({"inner": {"name": "a"}, "env": {"A": None}}, "env is None, not str"),
        ({"inner": {"name": "a"}, "code": "x" * 100}, "code is 'x{39}…, not int | None"),
        ({"inner": {"name": "a"}, "code": True}, "code is True, not int | None"),
        ({"inner": {"name": "a"}, "point": {}}, "point lacks 'x'"),
        ({"inner": {"name": "a"}, "flag": 1}, "flag is 1, not bool"),
    ],
)
def test_other_values_are_refused_by_name(data: object, message: str) -> None:
    with pytest.raises(codec.DecodeError, match=message):
        codec.decode(Outer, data)


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


def test_connections_of_a_thread_share_one_read_buffer(identity: Identity) -> None:
    server, client = identity.context(server=True), identity.context(server=False)

    async def run() -> int:
        pairs = [socket.socketpair() for _ in range(20)]
        ends = [
            ({"sock": end}, (server, client)[side], (None, _NAME)[side])
            for pair in pairs
            for side, end in enumerate(pair)
        ]
        opened = await asyncio.gather(*(open_streams(*end, 60.0) for end in ends))
        for number, (_, writer) in enumerate(opened):
            await messages.send(writer, {"from": number, "data": "x" * 40_000})
        found = await asyncio.gather(*(messages.receive(reader, 60.0) for reader, _ in opened))
        assert [message and message["from"] for message in found] == [number ^ 1 for number in range(40)]
        buffers = {id(writer.transport._ssl_protocol._ssl_buffer) for _, writer in opened}  # type: ignore[attr-defined]
        for _, writer in opened:
            writer.transport.abort()
        return len(buffers)

    assert asyncio.run(run()) == 1


def test_connections_of_others_in_the_process_are_as_asyncio_has_them() -> None:
    assert asyncio.sslproto.SSLProtocol.__module__ == "asyncio.sslproto"
    assert asyncio.sslproto.SSLProtocol.__name__ == "SSLProtocol"
