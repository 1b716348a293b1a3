# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the directory of the roles' replicas 0 is told, by whom, and for how long it counts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from torchx_monarch.controller import role_registry
from torchx_monarch.controller.host_events import StopRequested
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.rendezvous import Rendezvous, RendezvousError
from torchx_monarch.controller.role_registry import RegistryClient
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.system.console import Console
from torchx_monarch.transport import connections, messages
from torchx_monarch.transport.connections import Address
from torchx_monarch.transport.local_addresses import NetworkOptions


def address() -> Address:
    return Address("unix", path=str(Path(tempfile.gettempdir(), "r.sock")))


def registry_client(role: str = "b", start: str = "1") -> RegistryClient:
    """Of a host of another role than the first; the directory is at a socket file."""
    return RegistryClient(role, address(), start, is_main=False)


reporter = Reporter(Console(2), None, "b")


def host_network(port: int) -> HostNetwork:
    return HostNetwork(Address("tls", "10.0.0.7", port), NetworkOptions(), "10.0.0.7", "", None, "", "", "")


@contextlib.asynccontextmanager
async def kept(start: str = "1") -> AsyncIterator[Rendezvous]:
    rendezvous = Rendezvous(address(), replicas=1)
    dataclasses.replace(registry_client("a", start), is_main=True).serve(rendezvous)
    await rendezvous.start()
    try:
        yield rendezvous
    finally:
        assert rendezvous._listener is not None
        rendezvous._listener.close()
        await asyncio.sleep(0.05)
        Path(address().path).unlink()


async def asked(message: dict[str, Any]) -> dict[str, Any]:
    reader, writer = await connections.connect(address(), None, 5.0)
    await messages.send(writer, {"version": messages.VERSION, **message})
    answer = await messages.receive(reader, 10.0)
    writer.close()
    return answer or {}


def test_those_who_ask_are_told_when_it_is_known_and_the_newest_word_counts(
    leaves_nothing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role_registry, "_ASKED_FOR", 0.2)

    async def told() -> tuple[str, Any]:
        answer = await asked({"type": "where", "role": "b", "start": "1"})
        return answer["type"], answer.get("port")

    async def until(expected: tuple[str, Any]) -> None:
        async def poll() -> None:
            while await told() != expected:
                await asyncio.sleep(0.01)

        await asyncio.wait_for(poll(), 20)

    async def main() -> None:
        asking = asyncio.ensure_future(
            registry_client().find("b", host_network(0), 20.0)
        )  # before there is a directory
        telling = []
        async with kept() as rendezvous:
            assert await told() == ("refused", None)
            for port in (1001, 1002):
                telling.append(
                    asyncio.ensure_future(registry_client().tell(rendezvous, host_network(port), reporter, 20.0))
                )
                await until(("there", port))
                if port == 1001:
                    assert str(await asking) == "unix:10.0.0.7:1001"
            for port in (1002, 1001):  # each counts for as long as it is held
                await until(("there", port))
                telling.pop().cancel()
            await until(("refused", None))

    asyncio.run(main())


@pytest.mark.parametrize("start", ["1", ""])
def test_hosts_of_another_start_wait(leaves_nothing: None, monkeypatch: pytest.MonkeyPatch, start: str) -> None:
    monkeypatch.setattr(role_registry, "_ASKED_FOR", 0.2)

    async def main() -> None:
        async with kept("2") as rendezvous:
            telling = asyncio.ensure_future(
                registry_client(start=start).tell(rendezvous, host_network(1001), reporter, 0.5)
            )
            with pytest.raises(RendezvousError, match="in 0.5 s: .*r.sock: it is of another start of the app"):
                await registry_client(start=start).find("b", host_network(0), 0.5)
            await telling
            host_event = rendezvous.events.pending[0]
            assert isinstance(host_event, StopRequested)
            assert (
                "through which the hosts of role 'b' find theirs, was not reached in 0.5 s" in host_event.result.reason
            )
            assert (await asked({"type": "where", "role": "b", "start": "2"}))["type"] == "refused"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"type": "here", "role": 7, "start": "1", "host": "h", "port": 1}, "the name of a role is a text"),
        ({"type": "here", "role": "b", "start": "1", "host": "h"}, "with a host and a port"),
        ({"type": "here", "role": "b", "start": "1", "host": ["h"], "port": 1}, "with a host and a port"),
        ({"type": "where", "role": None, "start": "1"}, "the name of a role is a text"),
        ({"type": "where", "role": "b"}, "it is of another start"),
    ],
)
def test_what_makes_no_sense_is_refused(leaves_nothing: None, message: dict[str, Any], words: str) -> None:
    async def main() -> None:
        async with kept():
            answer = await asked(message)
            assert answer["type"] == "refused" and words in answer["reason"]

    asyncio.run(main())
