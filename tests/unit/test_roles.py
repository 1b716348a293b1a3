# SPDX-License-Identifier: BSD-3-Clause
"""The coordination of roles: which addresses the server gives out, and what it counts as the failure of a role."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.waits import WITHIN, until_async
from torchx_monarch.controller import roles as roles_module
from torchx_monarch.controller.host_events import StopRequested
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.controller.roles import RoleClient, Roles, RoleServer
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.system.console import Console
from torchx_monarch.transport import connections, messages
from torchx_monarch.transport.connections import Address

REPORTER = Reporter(Console(2), None, "b")


def address() -> Address:
    return Address("unix", path=str(Path(tempfile.gettempdir(), "r.sock")))


def other_role(start: str = "1", timeout: float = 20.0) -> Roles:
    """Those of a host whose replica 0 is looked up; the server is at a socket file."""
    return Roles(HostSpec("app", "b", host_timeout=timeout), start, address(), is_first=False, looks_up=True)


def host_network(port: int) -> HostNetwork:
    return HostNetwork(Address("tls", "10.0.0.7", port), HostSpec(), "10.0.0.7", "", None)


def registered(rendezvous: Rendezvous, port: int, roles: Roles) -> RoleClient:
    client = roles.coordinator(rendezvous, host_network(port), REPORTER)
    assert isinstance(client, RoleClient)
    return client


@contextlib.asynccontextmanager
async def serving(start: str = "1", peer_roles: int = 0) -> AsyncIterator[tuple[Rendezvous, RoleServer]]:
    rendezvous = Rendezvous(HostNetwork(address()))
    application = str(address()) if peer_roles else ""
    options = HostSpec("app", "a", role_registry=str(address()), application=application, peer_roles=peer_roles)
    roles = Roles.from_spec(options, str(address()), {"MONARCH_START": start})
    server = roles.coordinator(rendezvous, host_network(0), REPORTER)
    assert isinstance(server, RoleServer)
    await rendezvous.start()
    try:
        yield rendezvous, server
    finally:
        assert rendezvous._listener is not None
        rendezvous._listener.close()
        await asyncio.sleep(0.05)
        Path(address().path).unlink()


async def asked(*lines: dict[str, Any]) -> dict[str, Any]:
    reader, writer = await connections.connect(address(), None, 5.0)
    for line in lines:
        await messages.send(writer, {"version": messages.VERSION, **line})
    answer = await messages.receive(reader, 10.0)
    writer.close()
    return answer or {}


@pytest.mark.parametrize(
    ("name", "value", "start"), [("", "", ""), ("MONARCH_START", "7", "7"), ("MONARCH_START", "@ATTEMPT", "2")]
)
def test_the_start_of_an_app(name: str, value: str, start: str) -> None:
    assert Roles.from_spec(HostSpec("app", "b"), "unix:/b", {name: value, "ATTEMPT": "2"}).start == start


def test_an_address_is_found_when_it_is_registered_and_the_newest_counts(
    leaves_nothing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roles_module, "_LOOKUP_DELAY", 0.2)

    async def looked_up() -> tuple[str, Any]:
        answer = await asked({"type": "lookup-role", "role": "b", "start": "1"})
        return answer["type"], answer.get("port")

    async def until(expected: tuple[str, Any]) -> None:
        while await looked_up() != expected:
            await asyncio.sleep(0.01)

    async def main() -> None:
        finding = asyncio.ensure_future(other_role().find("b", host_network(0), 20.0))  # before there is a server
        clients = []
        async with serving() as (rendezvous, _):
            assert await looked_up() == ("refused", None)
            for port in (1001, 1002):
                clients.append(registered(rendezvous, port, other_role()))
                await until(("found", port))
                if port == 1001:
                    assert str(await finding) == "unix:10.0.0.7:1001"
            clients[0]._connection.cancel()
            await until(("found", 1002))
            clients[1]._connection.cancel()
            await until(("refused", None))

    asyncio.run(asyncio.wait_for(main(), WITHIN))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"type": "register-role", "role": 7, "start": "1", "host": "h", "port": 1}, "role is 7, not str"),
        ({"type": "register-role", "role": "b", "start": "1", "host": ["h"], "port": 1}, "host is ['h'], not str"),
        ({"type": "register-role", "role": "b", "start": "1", "host": "h", "port": "1"}, "port is '1', not int"),
        ({"type": "lookup-role", "role": None, "start": "1"}, "role is None, not str"),
        ({"type": "lookup-role", "role": "b"}, "lacks 'start'"),
    ],
)
def test_an_invalid_greeting_is_refused(leaves_nothing: None, message: dict[str, Any], words: str) -> None:
    async def main() -> None:
        async with serving():
            answer = await asked(message)
            assert answer["type"] == "refused" and words in answer["reason"]

    asyncio.run(main())


JOINT = {"type": "register-role", "role": "b", "start": "2", "joint": True}
READY = {"type": "ready"}
ENDED = {"type": "ended", "code": 7, "reason": "b/1 failed: boom", "stopped": False}


@pytest.mark.parametrize(
    ("sent", "answer", "event"),
    [
        ([{**JOINT, "start": "1"}], "it is of another start of the app", None),
        ([JOINT], "registered", None),  # it has succeeded immediately
        ([JOINT, READY], "registered", (1, "replica 0 of role 'b' was lost; the application begins again")),
        ([JOINT, READY, ENDED], "registered", (7, "b/1 failed: boom")),
        ([JOINT, READY, {**ENDED, "code": 0}], "registered", None),
        ([JOINT, READY, {**ENDED, "code": "x"}], "registered", (1, "replica 0 of role 'b' sent an invalid message")),
    ],
)
def test_the_end_of_another_role(
    leaves_nothing: None, sent: list[dict[str, Any]], answer: str, event: tuple[int, str] | None
) -> None:
    async def main() -> None:
        async with serving("2", peer_roles=1) as (rendezvous, server):
            answered = await asked(*sent)
            assert answer in (answered["type"], answered.get("reason")) or answer in answered["reason"]
            ended = lambda: not server._links and (event is None or rendezvous.events.pending)  # noqa: E731
            await until_async(ended, "the end of the connection")
            assert len(rendezvous.events.pending) == (event is not None)
            if event is not None:
                (posted,) = rendezvous.events.pending
                assert (posted.replica, type(posted), posted.result.consequence) == (0, StopRequested, True)
                assert posted.result.code == event[0] and posted.result.reason.startswith(event[1])
                late = await asked(JOINT)  # a replica 0 that is started again before this one has gone
                assert late["type"] == "refused" and late["later"]

    asyncio.run(main())
