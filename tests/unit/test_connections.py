# SPDX-License-Identifier: BSD-3-Clause
"""Why there is no connection, at either end, and that it works when there is no reason."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import ipaddress
import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tests.ports import free_port
from torchx_monarch.controller import host_network as wires_module
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.rendezvous import Rendezvous, RendezvousError
from torchx_monarch.controller.rendezvous_client import RendezvousClient
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.transport import address as address_module
from torchx_monarch.transport import connections, messages
from torchx_monarch.transport.connections import Address, AddressError, ConnectError, Identity

_NOW = datetime.datetime.now(datetime.timezone.utc)
_HOUR = datetime.timedelta(hours=1)
_LIFE = (_NOW - _HOUR, _NOW + _HOUR)
_PAST = (_NOW - 3 * _HOUR, _NOW - 2 * _HOUR)
_FUTURE = (_NOW + 2 * _HOUR, _NOW + 3 * _HOUR)

Validity = tuple[datetime.datetime, datetime.datetime]


class Authority:
    """Signs certificates of any kind; all of one name, as those of different jobs are."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "torchx-monarch hosts")])
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        self.certificate = self._build(self._name, self._key, _LIFE).add_extension(constraints, True)
        self._signed = self.certificate.sign(self._key, hashes.SHA256())

    def _build(self, name: x509.Name, key: ec.EllipticCurvePrivateKey, life: Validity) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder(self._name, name, key.public_key(), x509.random_serial_number())
        return builder.not_valid_before(life[0]).not_valid_after(life[1])

    def identity(
        self,
        life: Validity = _LIFE,
        address: str = "127.0.0.1",
        usage: str = "both",
        trusts: Authority | None = None,
    ) -> Identity:
        """A host's, that trusts this authority or another."""
        usages = {"server": [ExtendedKeyUsageOID.SERVER_AUTH], "client": [ExtendedKeyUsageOID.CLIENT_AUTH]}
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._build(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "host")]), key, life)
        name = x509.IPAddress(ipaddress.ip_address(address))
        builder = builder.add_extension(x509.SubjectAlternativeName([name]), False)
        kinds = usages.get(usage, usages["server"] + usages["client"])
        signed = builder.add_extension(x509.ExtendedKeyUsage(kinds), False).sign(self._key, hashes.SHA256())
        pem = serialization.Encoding.PEM
        secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        trusted = (trusts or self)._signed.public_bytes(pem)
        paths = [self._folder / f"{signed.serial_number}.{number}" for number in range(3)]
        for path, content in zip(paths, (signed.public_bytes(pem), secret, trusted), strict=True):
            path.write_bytes(content)
        return Identity(*map(str, paths))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def foreign(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


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
    """As a host that gives up for good after one second."""
    network = HostNetwork(address, HostSpec(peer_timeout=1 / 1.6), identity=identity)
    return await RendezvousClient.join(network, Registration(1, "h", 1, 1), timeout)


def why_not(address: Address, server: Identity | None, host: Identity | None, timeout: float = 5.0) -> str:
    """Why a host cannot join a rendezvous."""

    async def run() -> str:
        rendezvous = Rendezvous(HostNetwork(address, HostSpec(replicas=2), identity=server))
        await rendezvous.start()
        try:
            await join(address, host, timeout)
        except RendezvousError as error:
            assert rendezvous.hosts.missing == [0, 1]
            return str(error)
        finally:
            assert rendezvous._listener is not None
            rendezvous._listener.close()
        raise AssertionError("it joined")

    return asyncio.run(run())


def where(address: Address) -> str:
    return f"{address.host}:{address.port}: "


def test_a_host_of_the_job_joins(authority: Authority, address: Address) -> None:
    async def run() -> list[int]:
        rendezvous = Rendezvous(HostNetwork(address, HostSpec(replicas=2), identity=authority.identity()))
        await rendezvous.start()
        rendezvous_client = await join(address, authority.identity())
        rendezvous_client._writer.close()
        assert rendezvous._listener is not None
        rendezvous._listener.close()
        return rendezvous.hosts.missing

    assert asyncio.run(run()) == [0]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"address": "127.0.0.2"}, "its certificate is for another name than '127.0.0.1'"),
        ({"life": _PAST}, "its certificate has expired"),
        ({"life": _FUTURE}, "its certificate is not valid yet by the clock of this machine"),
        ({"usage": "client"}, "its certificate is not of this job's authority (un"),
    ],
    ids=["name", "expired", "early", "usage"],
)
def test_says_what_is_wrong_with_replica_0(
    authority: Authority, address: Address, bad: dict[str, Any], why: str
) -> None:
    assert where(address) + why in why_not(address, authority.identity(**bad), authority.identity())


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"life": _PAST}, "it takes this host's certificate for expired"),
        ({"life": _FUTURE}, "it refuses this host's certificate, perhaps as not valid yet: compare the two clocks"),
        ({"usage": "server"}, "it refuses this host's certificate as one that is not for this use"),
    ],
    ids=["expired", "early", "usage"],
)
def test_says_what_replica_0_has_against_it(
    authority: Authority, address: Address, bad: dict[str, Any], why: str
) -> None:
    assert where(address) + why in why_not(address, authority.identity(), authority.identity(**bad))


def test_says_that_it_belongs_to_another_job(authority: Authority, foreign: Authority, address: Address) -> None:
    ours, theirs = authority.identity(), foreign.identity()
    why = why_not(address, ours, theirs)
    assert where(address) + "its certificate is not of this job's authority" in why
    assert "it belongs to another job" in why
    # One that trusts us, and that we do not trust.
    why = why_not(address, ours, foreign.identity(trusts=authority))
    assert where(address) in why and "this host's certificate" in why and "it belongs to another job" in why


def test_says_that_one_end_does_not_speak_tls(authority: Authority, address: Address) -> None:
    assert where(address) + "what listens there does not speak TLS" in why_not(address, None, authority.identity())
    plain = Address("insecure-tcp", address.host, address.port)

    async def run() -> str:
        rendezvous = Rendezvous(HostNetwork(address, HostSpec(replicas=2), identity=authority.identity()))
        await rendezvous.start()
        with pytest.raises(RendezvousError) as caught:
            await join(plain, None, 1.0)
        assert rendezvous._listener is not None
        rendezvous._listener.close()
        return str(caught.value)

    assert str(plain) in asyncio.run(run())


def test_says_why_it_cannot_be_reached(authority: Authority, address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (connections, address_module):
        monkeypatch.setattr(module, "CONNECT_TIMEOUT", 0.5)

    def why(to: Address) -> str:
        with pytest.raises(ConnectError) as caught:
            asyncio.run(connections.connect(to, authority.identity(), 5.0))
        return str(caught.value)

    assert why(address) == where(address) + "connection refused: nothing listens there (yet)"
    unknown = why(Address("tls", "no-such-host.invalid", 1))
    assert unknown.startswith("no-such-host.invalid:1: the name 'no-such-host.invalid' cannot be resolved: ")
    assert why(Address("tls", "a..b", 1)).startswith("a..b:1: this is no address that can be dialled: ")
    assert why(Address("tls", "127.0.0.1", 99999)).startswith("127.0.0.1:99999: this is no address that can be dialled")
    assert why(Address("tls", "240.0.0.1", 1)).startswith("240.0.0.1:1: ")
    # One that answers no more: its queue is full.
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind(("127.0.0.1", address.port))
        full.listen(0)
        for _ in range(4):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        assert why(address) == where(address) + "unreachable: no answer within 0.5 s (a firewall, or a cut link)"


def test_one_release_on_all_hosts(authority: Authority, address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: Callable[..., Any] = messages.send

    async def another(writer: asyncio.StreamWriter, message: messages.Message) -> bool:
        return bool(await sent(writer, {**message, "version": 99} if message["type"] == "register" else message))

    monkeypatch.setattr(messages, "send", another)
    why = why_not(address, authority.identity(), authority.identity())
    assert "it speaks version 1 of the protocol, and this end version 99: install one release" in why


def host_network(address: Address, identity: Identity) -> HostNetwork:
    return HostNetwork(address, HostSpec(), address.host, "", identity)


def test_replica_0_tries_the_port_of_every_worker_loop(
    authority: Authority, foreign: Authority, address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wires_module, "_CHECK_TIMEOUT", 0.5)

    async def check(server: Identity | None, worker: str) -> dict[int, str]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()

        listening = await connections.listen(address, serve, server, "", 5.0)
        try:
            host = Registration(1, "node7", 4711, 1)
            return await host_network(address, authority.identity()).unreachable([(host, worker)])
        finally:
            listening.close()

    good = f"service@tls://127.0.0.1:{address.port}"
    assert asyncio.run(check(authority.identity(), good)) == {}
    bad: list[tuple[Identity | None, str, str]] = [
        (authority.identity(address="127.0.0.2"), good, "its certificate is for another name"),
        (foreign.identity(), good, "it belongs to another job"),
        (None, good, "no answer to the TLS handshake"),
        (None, "service@tls://127.0.0.1:1", "127.0.0.1:1: connection refused"),
        (None, "service@tls://127.0.0.1:99999", "no address that can be dialled"),
    ]
    for server, worker, why in bad:
        wrong = asyncio.run(check(server, worker))[1]
        assert wrong.startswith("host 1 (node7, pid 4711) ") and why in wrong


@pytest.mark.parametrize("text", ["", "tls:", "tls:a", "tls:a:0", "tls:a:65536", "tls::1", "tcp:a:1", "a:1", "unix:"])
def test_says_what_an_address_is(text: str) -> None:
    with pytest.raises(AddressError, match="X=.* is not of the form unix:PATH, tls:HOST:PORT or insecure-tcp"):
        Address.parse(text, "X")


def test_an_address_of_ipv6_needs_a_name() -> None:
    with pytest.raises(AddressError, match="an IPv6 address cannot be dialled by Monarch"):
        Address.parse("tls:[::1]:26599", "X")


def test_unauthenticated_connections_make_room_for_hosts(
    authority: Authority, address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silent connections, more than may await a handshake, keep no host out and are closed; hosts stay."""
    monkeypatch.setattr(connections, "_HANDSHAKE_TIMEOUT", 2.0)

    async def run() -> None:
        rendezvous = Rendezvous(HostNetwork(address, HostSpec(replicas=2), identity=authority.identity()))
        await rendezvous.start()
        rendezvous_client = await join(address, authority.identity())
        silent = [
            await asyncio.open_connection(address.host, address.port)
            for _ in range(3 * connections._MAX_UNAUTHENTICATED)
        ]
        reader, writer = await connections.connect(address, authority.identity(), 5.0)
        await messages.send(writer, {"type": "look", "version": messages.VERSION})
        state = await messages.receive(reader, 10.0)
        assert state is not None and state["missing"] == [0]
        closed = [asyncio.ensure_future(each.read()) for each, _ in silent]
        done, _ = await asyncio.wait(closed, timeout=20.0)
        assert len(done) == len(silent)
        await messages.send(rendezvous_client._writer, {"type": "alive"})
        assert await messages.receive(rendezvous_client._reader, 5.0) == {"type": "alive"}
        for each in [writer, rendezvous_client._writer, *(one for _, one in silent)]:
            each.close()
        assert rendezvous._listener is not None
        rendezvous._listener.close()

    asyncio.run(run())


@pytest.mark.parametrize(("number", "lines"), [(errno.EMFILE, 1), (errno.ECONNABORTED, 0)])
def test_a_want_of_descriptors_is_told_once_and_connections_wait(
    number: int, lines: int, authority: Authority, address: Address, monkeypatch: pytest.MonkeyPatch
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
        network = HostNetwork(address, HostSpec(replicas=2), identity=authority.identity())
        rendezvous = Rendezvous(network, say=said.append)
        await rendezvous.start()
        client = await join(address, authority.identity())
        client._writer.close()
        assert rendezvous._listener is not None and not failures
        rendezvous._listener.close()

    asyncio.run(run())
    assert [line.startswith("hosts and clients wait for their connection: ") for line in said] == [True] * lines
    assert all("(RLIMIT_NOFILE is " in line for line in said)


def test_one_of_two_gets_the_place(authority: Authority, address: Address) -> None:
    async def run() -> None:
        rendezvous = Rendezvous(HostNetwork(address, HostSpec(replicas=3), identity=authority.identity()))
        await rendezvous.start()
        tries = [asyncio.ensure_future(join(address, authority.identity())) for _ in range(8)]
        results = await asyncio.gather(*tries, return_exceptions=True)
        joined = [one for one in results if isinstance(one, RendezvousClient)]
        assert len(joined) == 1 and rendezvous.hosts.missing == [0, 2]
        assert all("has registered already: host 1 (h, pid 1)" in str(one) for one in results if one not in joined)
        assert rendezvous._listener is not None
        rendezvous._listener.close()
        joined[0]._writer.close()

    asyncio.run(run())
