# SPDX-License-Identifier: BSD-3-Clause
"""Messages: short ones, long ones, and what is neither."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from torchx_monarch.client.connection import Connection, Target
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.exceptions import UnreachableError
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
