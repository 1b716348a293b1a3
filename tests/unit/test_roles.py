# SPDX-License-Identifier: BSD-3-Clause
"""The coordination of roles: what the server counts as the failure of a role."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.waits import until_async
from torchx_monarch.controller.host_events import StopRequested
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.controller.roles import RoleServer, coordinator
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.system.console import Console
from torchx_monarch.transport import connections, messages
from torchx_monarch.transport.connections import Address

REPORTER = Reporter(Console(2), None, "b")


def address() -> Address:
    return Address("unix", path=str(Path(tempfile.gettempdir(), "r.sock")))


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[Rendezvous, RoleServer]]:
    options = HostSpec("app", "a", peer_roles=1)
    rendezvous = Rendezvous(HostNetwork(address(), options))
    server = coordinator(rendezvous, {}, REPORTER)
    assert isinstance(server, RoleServer)
    await rendezvous.start()
    try:
        yield rendezvous, server
    finally:
        rendezvous.network.close()
        await asyncio.sleep(0.05)


async def asked(*lines: dict[str, Any]) -> dict[str, Any]:
    reader, writer = await connections.connect(address(), None, 5.0)
    for line in lines:
        await messages.send(writer, {"version": messages.VERSION, **line})
    answer = await messages.receive(reader, 10.0)
    writer.close()
    return answer or {}


GREETING = {"type": "register-role", "role": "b"}
READY = {"type": "ready"}
ENDED = {"type": "ended", "code": 7, "reason": "b/1 failed: boom", "stopped": False}


@pytest.mark.parametrize(
    ("sent", "answer", "event"),
    [
        ([{**GREETING, "role": 7}], "role is 7, not str", None),
        ([{"type": "register-role"}], "role is None", None),
        ([{"type": "state", "role": "b"}], "these are the hosts of role 'a', not of 'b'", None),
        ([GREETING], "registered", None),  # it has succeeded immediately
        (
            [GREETING, READY],
            "registered",
            (1, "replica 0 of role 'b' was lost: its connection broke; all roles end with it"),
        ),
        ([GREETING, READY, ENDED], "registered", (7, "b/1 failed: boom")),
        ([GREETING, READY, {**ENDED, "code": 0}], "registered", None),
        ([GREETING, READY, {**ENDED, "code": "x"}], "registered", (1, "replica 0 of role 'b' sent an invalid message")),
    ],
)
def test_the_end_of_another_role(
    leaves_nothing: None, sent: list[dict[str, Any]], answer: str, event: tuple[int, str] | None
) -> None:
    async def main() -> None:
        async with serving() as (rendezvous, server):
            answered = await asked(*sent)
            assert answer in (answered["type"], answered.get("reason")) or answer in answered["reason"]
            ended = lambda: not server._links and (event is None or rendezvous.events.pending)  # noqa: E731
            await until_async(ended, "the end of the connection")
            assert len(rendezvous.events.pending) == (event is not None)
            if event is not None:
                (posted,) = rendezvous.events.pending
                assert (posted.replica, type(posted), posted.result.consequence) == (0, StopRequested, True)
                assert posted.result.code == event[0] and posted.result.reason.startswith(event[1])
                late = await asked(GREETING)  # a replica 0 that is started again before this one has gone
                assert late["type"] == "refused" and late["later"]

    asyncio.run(main())
