# SPDX-License-Identifier: BSD-3-Clause
"""The local addresses, interfaces and ports of a host, and the name by which the other hosts dial it."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping

from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.transport.address import Address

_SIOCGIFADDR = 0x8915


def interfaces() -> dict[str, str]:
    """Return the IPv4 addresses of this machine's interfaces, by interface name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def address_of(bind: str) -> str:
    """Return the IP address for a value of ``HostSpec.bind``; empty for an empty value."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(bind)) if bind else ""
    addresses = interfaces()
    if bind in addresses:
        return addresses[bind]
    listed = ", ".join(f"{name} ({address})" for name, address in addresses.items())
    raise ValueError(f"--bind {bind}: neither an address nor an interface of this machine, which has {listed}")


def expand_address(address: str, environ: Mapping[str, str], is_first: bool) -> str:
    """Replace ``@NAME`` in an address by the value of the environment variable NAME.

    On replica 0, schedulers leave the variable unset or set it to ``localhost``; the host is then this machine. TorchX
    sets it to ``localhost`` on all replicas where they share a machine.

    In ``unix:@NAME/FILE`` the variable names the folder of a socket file. The backend has set it on every host.
    """
    scheme, separator, rest = address.partition(":@")
    if not separator:
        return address
    if scheme == "unix":
        name, _, file = rest.partition("/")
        return f"unix:{environ.get(name, '')}/{file}"
    name, _, port = rest.partition(":")
    host = environ.get(name, "").strip()
    if host in ("", "localhost"):
        if not is_first and not host:
            raise ValueError(f"{name}={host!r} does not say where replica 0 is: this scheduler should have set it")
        host = _own_name()
    return f"{scheme}:{host}:{port}"


def _own_name() -> str:
    """Return the IP address of this machine, which needs no DNS on other machines, or else the machine's name."""
    name = socket.gethostname()
    with contextlib.suppress(OSError, ValueError):
        address = socket.gethostbyname(name)
        if not ipaddress.ip_address(address).is_loopback:
            return address
    return name


def advertised(rendezvous: Address, is_first: bool, options: HostSpec, ours: str = "") -> str:
    """Return the name or IP address by which the other hosts dial this one.

    Hosts dial replica 0 by the rendezvous address. Any other host advertises the local address of its route to replica
    0, because a machine may have several addresses and its own name often resolves to 127.0.1.1.

    Args:
        ours: this machine's address if the backend knows it, else empty. On Kubernetes a host's name does not resolve
            at first.
    """
    if options.advertise:
        return options.advertise
    bind = address_of(options.bind)
    if bind and not ipaddress.ip_address(bind).is_unspecified:
        return bind
    if ours and ":" not in ours:  # Monarch cannot dial numeric IPv6 addresses
        return ours
    if is_first:
        return rendezvous.host
    with contextlib.suppress(OSError):
        kind, _, _, _, where = socket.getaddrinfo(rendezvous.host, rendezvous.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # UDP: selects a route and sends nothing
            return str(probe.getsockname()[0])
    return socket.gethostname()  # no route to replica 0: joining the rendezvous reports it


def bind_port(bind: str, ports: tuple[int, int] | None) -> socket.socket:
    """Return a TCP socket that is bound to a free port of the range and does not listen yet."""
    address = address_of(bind)
    low, high = ports or (0, 0)
    for port in range(low, high + 1):
        sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            sock.bind((address, port))
            return sock
        except OSError as error:
            sock.close()
            failure = error.strerror
    what = "no port can be opened" if ports is None else f"none of the ports {low}-{high} (--ports) can be opened"
    raise ValueError(f"{what} on {address or 'any address'}: {failure}")


def gloo_interface(advertised_as: str) -> str:
    """Return the interface for GLOO_SOCKET_IFNAME; empty when Gloo's own choice is right.

    Gloo listens on the address of the machine's own name, often 127.0.1.1, which no other machine can dial.
    """
    with contextlib.suppress(OSError, ValueError):
        if not ipaddress.ip_address(socket.gethostbyname(socket.gethostname())).is_loopback:
            return ""
    with contextlib.suppress(OSError):
        ours = socket.gethostbyname(advertised_as)
        return next((name for name, address in interfaces().items() if address == ours), "")
    return ""
