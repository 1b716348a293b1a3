# SPDX-License-Identifier: BSD-3-Clause
"""Which address and which ports a host takes."""

from __future__ import annotations

import socket

import pytest

from tests.ports import free_port
from torchx_monarch.model.host_spec import HostSpec, parse_ports
from torchx_monarch.monarch_adapter.attachment import _spelled
from torchx_monarch.transport import local_addresses
from torchx_monarch.transport.connections import Address


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
