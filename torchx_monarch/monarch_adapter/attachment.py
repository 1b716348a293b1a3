# SPDX-License-Identifier: BSD-3-Clause
"""Attach to worker loops, and again where one of them has lost the request.

A request that reaches a worker loop a moment before that can deliver messages is sent back, which Monarch reports as a
fault of this process's root client alone (docs/explanation/upstream.md): on a busy machine in about one of a hundred
jobs. Each client numbers its messages to a host agent, which holds back those after a missing one. But a client counts
from 1 for each spelling of an address. So it sends a request that was returned to another spelling.

A fault that reaches the root client before Monarch has constructed its actor interrupts the main thread instead
("Actor object is missing when executing method __supervise__"). So the actor is waited for first.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torchx_monarch.model.env_names import MONARCH_NOISE
from torchx_monarch.transport.address import as_ipv6

if TYPE_CHECKING:
    from monarch import actor

CA = "trust_all_connections"
"""The only value that 0.7 accepts. It grants nothing: the mode of its folder protects an ipc:// address, mutual TLS
protects a tls:// address, and ``socket_guard`` protects the abstract sockets that Monarch always opens in the process
of the worker loop."""

_FIRST_LOOK = 0.25
"""Seconds until the first attempt looks for a returned request, and each further one twice as many. An attachment that
succeeds takes some hundredths of a second."""

_MAX_RESENDS = 4
"""Each makes the path of a socket three bytes longer, and MAX_RUN_DIR of ``run_dirs`` leaves room for these."""

_RETURNED = re.compile(r"undeliverable message to host_agent\.(service<\w+>).*::SetClientConfig\b", re.DOTALL)

_returned: set[str] = set()
"""Service ids of worker loops that have sent back a request to attach since it was sent."""


class _FaultHook:
    """Notes the requests to attach that were sent back, and passes on all other faults."""

    def __init__(self, others: Callable[[Any], None]) -> None:
        self._others = others

    def __call__(self, failure: Any) -> None:
        if found := _RETURNED.search(str(failure)):
            _returned.add(found[1])
        else:
            self._others(failure)


def attach(name: str, addresses: Sequence[str], timeout: float) -> actor.HostMesh:
    """Attach to worker loops, and wait until it is done.

    Args:
        addresses: address of each worker loop: service id, ``@``, and the URL on which it listens.
        timeout: seconds for all attempts together; ``TimeoutError`` is raised after them.
    """
    from monarch import actor

    if not isinstance(actor.unhandled_fault_hook, _FaultHook):
        actor.unhandled_fault_hook = _FaultHook(actor.unhandled_fault_hook)
    lost = {address.partition("@")[0]: 0 for address in addresses}
    until = time.monotonic() + timeout
    _start_root_client(timeout)
    for attempt in itertools.count():
        wait = _FIRST_LOOK * 2**attempt
        _returned.difference_update(lost)
        workers = [_spelled(address, count) for address, count in zip(addresses, lost.values(), strict=True)]
        mesh = actor.attach_to_workers(ca=CA, workers=workers, name=name)
        done = mesh.initialized
        while True:
            left = until - time.monotonic()
            try:
                done.get(timeout=max(0.0, min(wait, left)))
                return mesh
            except TimeoutError:
                if left <= wait:
                    raise
            if attempt < _MAX_RESENDS and (returned := _returned.intersection(lost)):
                lost.update({service: lost[service] + 1 for service in returned})
                break
    raise AssertionError("unreachable")


@contextlib.contextmanager
def without_noise() -> Iterator[None]:
    """Hold back what the process writes to stderr, then write all but what Monarch says of its log file."""
    try:
        stderr = os.dup(2)
    except OSError:  # closed; the file below would get its number
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            held.seek(0)
            for line in held:
                if MONARCH_NOISE.fullmatch(line.rstrip(b"\n")) is None:
                    os.write(2, line)


def _start_root_client(timeout: float) -> None:
    """Create the root client of this process, if it has none, and wait until Monarch has constructed its actor.

    Monarch constructs the actor in the background, some milliseconds after ``context()`` has returned.
    """
    from monarch import actor
    from monarch._src.actor import actor_mesh

    if actor_mesh._client_context.try_get() is not None:
        return
    constructed = threading.Event()
    actor_mesh.RootClientActor.__init__ = lambda self: constructed.set()
    try:
        with without_noise():
            actor.context()
            if not constructed.wait(timeout):
                raise TimeoutError(f"Monarch's root client has not started within {timeout:g} s")
    finally:
        del actor_mesh.RootClientActor.__init__


def _spelled(address: str, number: int) -> str:
    """Return one of the spellings of a worker loop's address; another one for each number, as far as there are any.

    Monarch compares addresses as Rust does: paths without ``//`` and ``/./``, those of ``tcp://`` as the numbers to
    which names resolve, those of ``tls://`` as a number, without its scope, or as the letters of a name. Certificates
    hold an address in both of its forms, and their names in any case.
    """
    service, _, url = address.partition("@")
    scheme, _, place = url.partition("://")
    if not number:
        return address
    if scheme == "ipc":
        return f"{service}@ipc://{'/..' * number}{place}"
    host, _, port = place.rpartition(":")
    if scheme == "tcp":
        with contextlib.suppress(OSError):
            host = socket.gethostbyname(host)
    if mapped := as_ipv6(host):
        host = f"[{mapped}%{number}]" if scheme == "tcp" else f"[{mapped}]"
    else:
        letters = (place for place, letter in enumerate(host) if letter.isalpha())
        swapped = {place for bit, place in enumerate(letters) if number >> bit & 1}
        host = "".join(letter.swapcase() if place in swapped else letter for place, letter in enumerate(host))
    return f"{service}@{scheme}://{host}:{port}"
