# SPDX-License-Identifier: BSD-3-Clause
"""Messages: short ones, long ones, what is neither; and data classes of JSON that may hold anything."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from torchx_monarch.client.connection import Connection, Target
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.exceptions import UnreachableError
from torchx_monarch.model import codec
from torchx_monarch.transport import messages
from torchx_monarch.transport.address import Address

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
        assert rendezvous._listener is not None
        rendezvous._listener.close()
        return answer

    assert asyncio.run(main())["reason"] == "a line is over the limit of 65536 bytes"
    Path(address.path).unlink()


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
