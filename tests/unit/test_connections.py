# SPDX-License-Identifier: BSD-3-Clause
"""Which address and ports a host takes, why there is no connection, and that it works when there is no reason."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.ports import free_port
from torchx_monarch.controller.host_network import HostNetwork, RendezvousError
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.controller.rendezvous_client import RendezvousClient
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.host_spec import HostSpec, parse_ports
from torchx_monarch.monarch_adapter.attachment import _spelled
from torchx_monarch.transport import connections, credentials, local_addresses
from torchx_monarch.transport.connections import Address, AddressError, ConnectError, Identity

Issuer = Callable[..., Identity]


def issuer(folder: Path) -> Issuer:
    """Return what makes the identities of the hosts of a job, by their address."""
    hosts, _ = credentials.create()
    return lambda address="127.0.0.1": Identity.from_credentials(hosts, {address}, str(folder))


@pytest.fixture
def identity(tmp_path: Path) -> Issuer:
    return issuer(tmp_path)


@pytest.fixture
def foreign(tmp_path: Path) -> Issuer:
    return issuer(tmp_path)


@pytest.fixture
def address() -> Address:
    return Address("tls", "127.0.0.1", free_port())


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What another end does wrong is in no log of asyncio's."""
    with caplog.at_level(logging.WARNING):
        yield
    assert not caplog.records


async def join(address: Address, identity: Identity | None, timeout: float = 5.0) -> RendezvousClient:
    """As a host that gives up for good after a third of a second."""
    network = HostNetwork(address, HostSpec(lease=1.2), identity=identity)
    return await RendezvousClient.join(network, Registration(1, "h", 1), timeout)


@contextlib.asynccontextmanager
async def listening(
    address: Address, identity: Identity | None, replicas: int = 2, **more: Any
) -> AsyncIterator[Rendezvous]:
    rendezvous = Rendezvous(HostNetwork(address, HostSpec(replicas=replicas), identity=identity), **more)
    await rendezvous.start()
    yield rendezvous
    rendezvous.network.close()


def why_not(address: Address, server: Identity | None, host: Identity | None, to: Address | None = None) -> str:
    """Why a host cannot join a rendezvous."""

    async def run() -> str:
        async with listening(address, server) as rendezvous:
            with pytest.raises(RendezvousError) as caught:
                await join(to or address, host, 1.0)
            assert rendezvous.members.missing == [0, 1]
        return str(caught.value)

    return asyncio.run(run())


def where(address: Address) -> str:
    return f"{address.host}:{address.port}: "


def test_says_that_one_end_does_not_speak_tls(identity: Issuer, address: Address) -> None:
    said = "the TLS handshake failed, perhaps with another program: WRONG_VERSION_NUMBER"
    assert where(address) + said in why_not(address, None, identity())
    plain = Address("insecure-tcp", address.host, address.port)
    assert str(plain) in why_not(address, identity(), None, plain)


def test_says_why_it_cannot_be_reached(identity: Issuer, address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    def why(to: Address) -> str:
        with pytest.raises(ConnectError) as caught:
            asyncio.run(connections.connect(to, identity(), 5.0))
        return str(caught.value)

    assert why(address) == where(address) + "connection refused: nothing listens there (yet)"
    with monkeypatch.context() as patch:  # some networks need long to say so
        patch.setattr(socket, "getaddrinfo", Mock(side_effect=socket.gaierror(socket.EAI_NONAME, "unknown")))
        unknown = why(Address("tls", "no-such-host.invalid", 1))
    assert unknown.startswith("no-such-host.invalid:1: the name 'no-such-host.invalid' cannot be resolved: ")
    assert why(Address("tls", "a..b", 1)).startswith("a..b:1: this is no address that can be dialled: ")
    assert why(Address("tls", "127.0.0.1", 99999)).startswith("127.0.0.1:99999: this is no address that can be dialled")
    assert why(Address("tls", "240.0.0.1", 1)).startswith("240.0.0.1:1: ")
    with monkeypatch.context() as patch:
        both = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{n}", address.port)) for n in (1, 2)]
        patch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
        assert why(Address("tls", "both", address.port)).endswith(": connection refused: nothing listens there (yet)")


def test_replica_0_tries_the_port_of_every_worker_loop(
    identity: Issuer, foreign: Issuer, address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(server: Identity | None, worker: str) -> str:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()

        listening = connections.Listener(address, serve, server, "", 5.0)
        try:
            host = Registration(1, "node7", 4711)
            network = HostNetwork(address, HostSpec(), address.host, "", identity())
            return await network.why_unreachable([(host, worker)])
        finally:
            listening.close()

    good = f"service@tls://127.0.0.1:{address.port}"
    assert asyncio.run(check(identity(), good)) == ""
    bad: list[tuple[Identity | None, str, str]] = [
        (identity("127.0.0.2"), good, "IP address mismatch"),
        (foreign(), good, "it belongs to another job"),
        (None, good, "no answer to the TLS handshake"),
        (None, "service@tls://127.0.0.1:1", "127.0.0.1:1: connection refused"),
        (None, "service@tls://127.0.0.1:99999", "no address that can be dialled"),
    ]
    for server, worker, why in bad:
        monkeypatch.setattr(connections, "HANDSHAKE_TIMEOUT", 5.0 if server else 0.5)
        wrong = asyncio.run(check(server, worker))
        assert wrong.startswith("host 1 (node7, pid 4711) ") and why in wrong


@pytest.mark.parametrize("text", ["", "tls:", "tls:a", "tls:a:0", "tls:a:65536", "tls::1", "tcp:a:1", "a:1", "unix:"])
def test_says_what_an_address_is(text: str) -> None:
    with pytest.raises(AddressError, match="X=.* is not of the form unix:PATH, tls:HOST:PORT or insecure-tcp"):
        Address.parse(text, "X")


def test_an_address_of_ipv6_needs_a_name() -> None:
    with pytest.raises(AddressError, match="an IPv6 address cannot be dialled by Monarch"):
        Address.parse("tls:[::1]:26599", "X")


@pytest.mark.parametrize(("number", "lines"), [(errno.EMFILE, 1), (errno.ECONNABORTED, 0)])
def test_a_want_of_descriptors_is_told_once_and_connections_wait(
    number: int, lines: int, identity: Issuer, address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        accept, failures = loop.sock_accept, [number, number]

        async def failing(listening: socket.socket) -> Any:
            if failures:
                raise OSError(failures[0], os.strerror(failures.pop()))
            return await accept(listening)

        monkeypatch.setattr(loop, "sock_accept", failing, raising=False)
        async with listening(address, identity(), say=said.append):
            client = await join(address, identity())
            client._channel.close()
            assert not failures

    asyncio.run(run())
    assert [line.startswith("hosts and clients wait for their connection: ") for line in said] == [True] * lines
    assert all("(RLIMIT_NOFILE is " in line for line in said)


def test_a_long_answer_at_the_end_of_a_connection_is_no_error(tmp_path: Path) -> None:
    """CPython's ``abort`` fails once a transport has sent what it had when it was closed."""
    address, served = Address("unix", path=str(tmp_path / "s")), list[asyncio.Task[None] | None]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.current_task())
        writer.write(b"x" * 10_000_000)

    async def main() -> None:
        listener = connections.Listener(address, serve, None, "", 5.0)
        reader, writer = await connections.connect(address, None, 5.0)
        assert len(await reader.read()) == 10_000_000
        assert served[0] is not None
        await served[0]
        writer.close()
        listener.close()
        os.unlink(address.path)

    asyncio.run(main())


def test_one_of_two_gets_the_place(identity: Issuer, address: Address) -> None:
    async def run() -> None:
        async with listening(address, identity(), replicas=3) as rendezvous:
            tries = [asyncio.ensure_future(join(address, identity())) for _ in range(8)]
            results = await asyncio.gather(*tries, return_exceptions=True)
            joined = [result for result in results if isinstance(result, RendezvousClient)]
            assert len(joined) == 1 and rendezvous.members.missing == [0, 2]
            assert all(
                "has registered already: host 1 (h, pid 1)" in str(result) for result in results if result not in joined
            )
        joined[0]._channel.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("url", "again"),
    [
        ("ipc:///run/w", ["ipc:///../run/w", "ipc:///../../run/w"]),
        ("tcp://10.0.0.7:26600", ["tcp://[::ffff:10.0.0.7%1]:26600", "tcp://[::ffff:10.0.0.7%2]:26600"]),
        ("tcp://localhost:26600", ["tcp://[::ffff:127.0.0.1%1]:26600", "tcp://[::ffff:127.0.0.1%2]:26600"]),
        ("tls://10.0.0.7:26600", ["tls://[::ffff:10.0.0.7]:26600"]),
        ("tls://node-1b:26600", [f"tls://{name}-1b:26600" for name in ("Node", "nOde", "NOde", "noDe")]),
    ],
)
def test_spellings_of_the_address_of_a_worker_loop(url: str, again: list[str]) -> None:
    spellings = [_spelled(f"service<a1>@{url}", number) for number in range(len(again) + 1)]
    assert spellings == [f"service<a1>@{spelling}" for spelling in (url, *again)]


@pytest.mark.parametrize(("text", "ports"), [("26600", (26600, 26600)), ("1-65535", (1, 65535))])
def test_reads_ports(text: str, ports: tuple[int, int]) -> None:
    assert parse_ports(text) == ports


@pytest.mark.parametrize("text", ["", "0", "65536", "5-4", "1-", "-5", "1-2-3", "1,2", "ports", "1 - 2", "²"])
def test_says_what_ports_are(text: str) -> None:
    with pytest.raises(ValueError, match="is no port and no range of ports such as 26600-26699"):
        parse_ports(text)


def test_binds_to_addresses_and_interfaces() -> None:
    assert local_addresses.address_of("") == ""
    assert local_addresses.address_of("127.0.0.1") == "127.0.0.1"
    assert local_addresses.address_of("::1") == "::1"
    assert local_addresses.address_of("lo") == "127.0.0.1"
    with pytest.raises(ValueError, match=r"--bind nonsense: neither an address nor .* which has .*lo \(127.0.0.1\)"):
        local_addresses.address_of("nonsense")


def test_takes_the_ports_of_its_range_and_no_other() -> None:
    port = free_port()
    with local_addresses.bind_port("127.0.0.1", (port, port)) as taken:
        assert taken.getsockname() == ("127.0.0.1", port)
        with pytest.raises(ValueError, match=rf"none of the ports {port}-{port} \(--ports\) .* 127.0.0.1: Address"):
            local_addresses.bind_port("127.0.0.1", (port, port))
    with pytest.raises(ValueError, match="no port can be opened on 203.0.113.1: Cannot assign"):
        local_addresses.bind_port("203.0.113.1", None)


def test_finds_replica_0_through_a_variable() -> None:
    address = "tls:@MAIN:26599"
    assert local_addresses.expand_address(address, {"MAIN": "10.0.0.1"}, False) == "tls:10.0.0.1:26599"
    assert local_addresses.expand_address("tls:node0:26599", {}, True) == "tls:node0:26599"
    with pytest.raises(ValueError, match="MAIN='' does not say where replica 0 is"):
        local_addresses.expand_address(address, {}, False)
    name = socket.gethostname()
    for environ, is_first in (({}, True), ({"MAIN": "localhost"}, True), ({"MAIN": "localhost"}, False)):
        # On replica 0's machine. Where its name is that of the loopback, others may know better what to make of it.
        assert local_addresses.expand_address(address, environ, is_first) in {
            f"tls:{host}:26599" for host in (name, resolved(name))
        }


def resolved(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return name


def test_is_known_by_what_leads_to_replica_0() -> None:
    rendezvous = Address("tls", "127.0.0.1", 26599)
    assert local_addresses.advertised(rendezvous, True, HostSpec()) == "127.0.0.1"
    assert local_addresses.advertised(rendezvous, False, HostSpec()) == "127.0.0.1"
    assert local_addresses.advertised(rendezvous, False, HostSpec(bind="127.0.0.2")) == "127.0.0.2"
    assert local_addresses.advertised(rendezvous, False, HostSpec(bind="0.0.0.0")) == "127.0.0.1"
    assert local_addresses.advertised(rendezvous, True, HostSpec(bind="lo", advertise="me")) == "me"
