# SPDX-License-Identifier: BSD-3-Clause
"""Attack a port of a job: ``python -m tests.network.attacks HOST PORT [FILE N]``.

Clients without a valid certificate connect; with FILE, which holds the credentials of the job's hosts
(``credentials.HostCredentials``), clients with one also send malformed messages. N scales the number of the others,
85 for each. Prints the number of connections of each kind, as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import ssl
import struct
import sys
import tempfile
from collections.abc import Awaitable, Callable

from torchx_monarch.transport import credentials, messages
from torchx_monarch.transport.connections import Identity

_AT_A_TIME = 50
_SILENT_AT_A_TIME = 300
_SILENT_FOR = 3.0
_PATIENCE = 10.0

_RANDOM = random.Random(1)

Attack = Callable[[], Awaitable[None]]


class Attacker:
    """Connections to one port.

    Args:
        host: its address.
        port: its number.
    """

    def __init__(self, host: str, port: int) -> None:
        self._where = (host, port)
        hello = ssl.MemoryBIO()
        context = ssl.create_default_context()
        with contextlib.suppress(ssl.SSLWantReadError):
            context.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="x").do_handshake()
        self._hello = hello.read()

    async def plain(self, data: bytes, reset: bool = False, held: float = 0.0) -> None:
        """Send bytes, then close or reset, at once or after a time or when the other end has."""
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            reader, writer = await asyncio.wait_for(asyncio.open_connection(*self._where), _PATIENCE)
            try:
                writer.write(data)
                if held:
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(reader.read(), held)
                if reset:
                    linger = struct.pack("ii", 1, 0)
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            finally:
                writer.close()

    async def noise(self) -> None:
        """Random bytes, sometimes many."""
        size = _RANDOM.choice((0, 1, 5, 100, 2000, 100_000))
        await self.plain(_RANDOM.randbytes(size), held=_RANDOM.choice((0.0, 0.2)))

    async def half_a_handshake(self) -> None:
        """A ClientHello that is cut off, or goes on with noise."""
        cut = _RANDOM.randrange(1, len(self._hello))
        rest = _RANDOM.randbytes(_RANDOM.choice((0, 0, 200)))
        await self.plain(self._hello[:cut] + rest, held=_RANDOM.choice((0.0, 0.0, 0.5)))

    async def reset(self) -> None:
        """Nothing or the first bytes of TLS, and a reset."""
        await self.plain(self._hello[: _RANDOM.choice((0, 3, len(self._hello)))], reset=True)

    async def silence(self) -> None:
        """A connection that says nothing, for as long as it is let."""
        await self.plain(b"", held=_SILENT_FOR)

    async def encrypted(self, context: ssl.SSLContext, pieces: list[bytes], pause: float = 0.0) -> None:
        """Send pieces over TLS, and wait until the other end has closed."""
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            opening = asyncio.open_connection(*self._where, ssl=context, server_hostname=self._where[0])
            reader, writer = await asyncio.wait_for(opening, _PATIENCE)
            try:
                for piece in pieces:
                    writer.write(piece)
                    await asyncio.wait_for(writer.drain(), _PATIENCE)
                    await asyncio.sleep(pause)
                await asyncio.wait_for(reader.read(), _PATIENCE)
            finally:
                writer.transport.abort()


def context_of(hosts: credentials.HostCredentials, folder: str) -> ssl.SSLContext:
    """TLS with a certificate of these credentials; the other end's is not looked at."""
    context = Identity.from_credentials(hosts, ["x"], folder).context(server=False)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def monsters() -> list[list[bytes]]:
    """Messages by hand, in pieces: too long, too deep, no text, slow."""
    limit = messages.MAX_LINE
    brackets = [b"[" * depth + b"]" * depth + b"\n" for depth in (100, 900, 30_000)]
    nested = [b'{"version": ' + bracket[:-1] + b"}\n" for bracket in brackets]
    keys = json.dumps({"type": "register", "version": 1, "host": {"k" * 60_000: 1}}).encode() + b"\n"
    digits = b'{"version": 1' + b"0" * 5000 + b"}\n"
    return [
        [b"x" * limit, b"x" * limit, b"x" * limit, b"\n"],
        [b'{"type": "' + b"r" * (limit + 1) + b'"}\n'],
        *([line] for line in (*brackets, *nested, keys, digits)),
        [bytes(range(256)) * 100 + b"\n"],
        *([b'{"frame":' + size + b"}\n", b"x" * 1000] for size in (b"-1", b"8000000", b"99999999999999", b'"x"')),
        [b"\xff\xfe\x00\n"],
        [b"\n"] * 10,
        [],
    ]


async def _all(attacks: list[Attack], at_a_time: int) -> None:
    slots = asyncio.Semaphore(at_a_time)

    async def one(attack: Attack) -> None:
        async with slots:
            await attack()

    await asyncio.gather(*(one(attack) for attack in attacks))


async def unauthenticated_clients(attacker: Attacker, scale: int) -> dict[str, int]:
    """Connect without a certificate that the job's authority has signed."""
    with tempfile.TemporaryDirectory() as folder:
        foreign = context_of(credentials.create()[0], folder)
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE
    rounds: dict[str, tuple[Attack, int, int]] = {
        "noise": (attacker.noise, 35 * scale, _AT_A_TIME),
        "half a handshake": (attacker.half_a_handshake, 20 * scale, _AT_A_TIME),
        "reset": (attacker.reset, 19 * scale, _AT_A_TIME),
        "silence": (attacker.silence, 6 * scale, _SILENT_AT_A_TIME),
        "foreign": (lambda: attacker.encrypted(foreign, [b"{}\n"]), 3 * scale, _AT_A_TIME),
        "no certificate": (lambda: attacker.encrypted(nobody, [b"{}\n"]), 2 * scale, _AT_A_TIME),
    }
    for attack, number, at_a_time in rounds.values():
        await _all([attack] * number, at_a_time)
    return {name: number for name, (_, number, _) in rounds.items()}


async def malformed_hosts(attacker: Attacker, hosts: credentials.HostCredentials) -> dict[str, int]:
    """Connect with the job's certificate and send malformed messages."""
    with tempfile.TemporaryDirectory() as folder:
        context = context_of(hosts, folder)

    def sending(pieces: list[bytes], pause: float = 0.0) -> Attack:
        return lambda: attacker.encrypted(context, pieces, pause)

    by_hand = [sending(pieces) for pieces in monsters()]
    slow = [sending([bytes([byte]) for byte in b'{"type": "state", "version": 1}'], 0.1) for _ in range(20)]
    await _all([*by_hand, *slow], _AT_A_TIME)
    return {"monsters": len(by_hand), "slow": len(slow)}


async def _main(host: str, port: str, file: str = "", hundreds: str = "4") -> None:
    attacker = Attacker(host, int(port))
    done = await unauthenticated_clients(attacker, int(hundreds))
    if file:
        with open(file) as text:
            hosts = credentials.HostCredentials.from_text(text.read())
        done |= await malformed_hosts(attacker, hosts)
    print(json.dumps(done))


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
