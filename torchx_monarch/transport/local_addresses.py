# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which address and which ports of this machine a host uses, and by which name the others know it."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Mapping

from torchx_monarch.transport.connections import PEER_TIMEOUT, Address

_SIOCGIFADDR = 0x8915


class NetworkError(ValueError):
    """An option names what this machine does not have, or no port is free."""


@dataclasses.dataclass(frozen=True)
class NetworkOptions:
    """What a user may say of a host's network; the defaults do for machines with one network.

    Attributes:
        bind: address or interface that the host's ports are opened on; empty for all.
        advertise: name or address by which the other hosts dial it; empty for the one that leads to replica 0.
        ports: the lowest and the highest port that Monarch may listen on; None for any free one.
        peer_timeout: seconds of a machine's silence until it counts as lost.
    """

    bind: str = ""
    advertise: str = ""
    ports: tuple[int, int] | None = None
    peer_timeout: float = PEER_TIMEOUT


def parse_ports(text: str) -> tuple[int, int]:
    """Read ``26600`` or ``26600-26699``.

    Raises:
        ValueError: it is neither; the message says what is allowed.
    """
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 0 < low <= high < 65536:
        raise ValueError(f"{text!r} is no port and no range of ports such as 26600-26699, within 1 to 65535")
    return low, high


def interfaces() -> dict[str, str]:
    """The IPv4 address of every interface that has one, by its name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def address_of(bind: str) -> str:
    """The address that ``NetworkOptions.bind`` means.

    Raises:
        NetworkError: it is neither an address nor an interface with an IPv4 address.
    """
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(bind)) if bind else ""
    known = interfaces()
    if bind in known:
        return known[bind]
    listed = ", ".join(f"{name} ({address})" for name, address in known.items())
    raise NetworkError(f"--bind {bind}: neither an address nor an interface of this machine, which has {listed}")


def expanded(address: str, environ: Mapping[str, str], is_first: bool) -> str:
    """An address with ``@NAME`` replaced by what that environment variable says.

    On replica 0 itself, schedulers leave the variable out or say ``localhost``: there it is this machine itself. ``@``
    without a name is nobody's to say but replica 0's (``controller.role_registry``). With MONARCH_PORT_OFFSET the port
    is another one: of what was submitted once several runs may be on one machine.

    Raises:
        NetworkError: the variable says nothing, and this is not replica 0.
    """
    scheme, separator, rest = address.partition(":@")
    if not separator:
        return address
    name, _, port = rest.partition(":")
    port = _shifted(port, int(environ.get("MONARCH_PORT_OFFSET") or 0))
    host = environ.get(name, "").strip()
    if host in ("", "localhost"):
        if not is_first and not name:
            raise NetworkError(f"{address!r} does not say where replica 0 is, and there is no --directory to ask")
        if not is_first:
            raise NetworkError(f"{name}={host!r} does not say where replica 0 is: this scheduler should have set it")
        host = _own_name()
    return f"{scheme}:{host}:{port}"


def _shifted(port: str, by: int) -> str:
    """The port so far on, within its ten thousand: those that submissions draw are below outgoing connections'."""
    if not by or not port.isdigit():
        return port
    low = max(int(port) // 10000 * 10000, 1024)
    high = min(int(port) // 10000 * 10000 + 10000, 65536)
    return str(low + (int(port) - low + by) % (high - low))


def _own_name() -> str:
    """The address that this machine's name stands for, which others need no DNS to dial; else the name."""
    name = socket.gethostname()
    with contextlib.suppress(OSError, ValueError):
        address = socket.gethostbyname(name)
        if not ipaddress.ip_address(address).is_loopback:
            return address
    return name


def advertised(rendezvous: Address, is_first: bool, options: NetworkOptions, ours: str = "") -> str:
    """The name or address by which the other hosts dial this one.

    Replica 0 is dialled by the rendezvous's own name already. Another host's is the address of the way that leads
    there: a machine may have several, and its own name often stands for 127.0.1.1.

    Args:
        rendezvous: where replica 0 listens.
        is_first: whether this is replica 0.
        options: the user's.
        ours: this machine's address where the backend knows it: on Kubernetes a name leads nowhere at first.
    """
    if options.advertise:
        return options.advertise
    bind = address_of(options.bind)
    if bind and not ipaddress.ip_address(bind).is_unspecified:
        return bind
    if ours and ":" not in ours:  # Monarch cannot dial IPv6 as numbers
        return ours
    if is_first:
        return rendezvous.host
    with contextlib.suppress(OSError):
        kind, _, _, _, where = socket.getaddrinfo(rendezvous.host, rendezvous.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing
            return str(probe.getsockname()[0])
    return socket.gethostname()  # there is no way to replica 0, which joining it will report


def bound(options: NetworkOptions) -> socket.socket:
    """A TCP socket with a port of its own, which does not listen yet.

    Raises:
        NetworkError: no port of the range is free.
    """
    address = address_of(options.bind)
    low, high = options.ports or (0, 0)
    for port in range(low, high + 1):
        kind = socket.AF_INET6 if ":" in address else socket.AF_INET
        one = socket.socket(kind, socket.SOCK_STREAM)
        try:
            one.bind((address, port))
            return one
        except OSError as error:
            one.close()
            failure = error.strerror
    raise NetworkError(
        f"no port can be opened on {address or 'any address'}: {failure}"
        if options.ports is None
        else f"none of the ports {low}-{high} (--ports) can be opened on {address or 'any address'}: {failure}"
    )


def gloo_interface(advertised_as: str) -> str:
    """The interface that Gloo must be told of because it would take a wrong one; empty when it finds the right one.

    Gloo listens where the machine's own name leads, often 127.0.1.1, which no other machine can dial.
    """
    try:
        if not ipaddress.ip_address(socket.gethostbyname(socket.gethostname())).is_loopback:
            return ""
    except (OSError, ValueError):
        pass
    try:
        ours = socket.gethostbyname(advertised_as)
    except OSError:
        return ""
    return next((name for name, address in interfaces().items() if address == ours), "")
