# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures of the tests over a network."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.local.hosts import Hosts
from tests.network.namespaces import Network
from torchx_monarch.transport import credentials

PORT = 26599
"""Of the rendezvous, on machine 0; each network has its own."""


@pytest.fixture
def network(leaves_nothing: None) -> Iterator[Callable[[int], Network]]:
    """Makes a network of so many machines."""
    made: list[Network] = []

    def make(machines: int) -> Network:
        made.append(Network(machines))
        return made[-1]

    yield make
    with contextlib.ExitStack() as stack:  # each of them, even when one cannot be removed
        for opened in made:
            stack.callback(opened.remove)


def host_processes(folder: Path, network: Network, command: list[str], replicas: int = 2, **rest: Any) -> Hosts:
    """Make host processes that meet over TLS, replica N on machine N."""
    hosts, client = credentials.create()
    (folder / "client").write_text(client.to_text())
    environ = {
        "MONARCH_RENDEZVOUS": f"tls:{network.address(0)}:{PORT}",
        "MONARCH_CREDENTIALS": hosts.to_text(),
        **rest.pop("environ", {}),
    }
    within = {replica: network.within(replica) for replica in range(replicas)}
    return Hosts(folder, command, replicas, environ=environ, within=within, **rest)


@pytest.fixture
def networked(folder: Path) -> Callable[..., Hosts]:
    """Makes host processes (``host_processes``)."""
    return functools.partial(host_processes, folder)
