# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Whom replica 0 of the first role links, and what counts as the failure of another role."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pytest

from torchx_monarch.controller import role_coordinator
from torchx_monarch.controller.host_events import StopRequested
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.transport import connections, messages
from torchx_monarch.transport.connections import Address

LINK = {"type": "link", "role": "b", "start": "2"}
ENDED = {"type": "ended", "code": 7, "reason": "b/1 failed: boom", "stopped": False}


@pytest.mark.parametrize(
    ("said", "answer", "host_event"),
    [
        ([{**LINK, "start": "1"}], "it is of another start of the app", None),
        ([{**LINK, "role": ["b"]}], "the name of a role is a text", None),
        ([LINK], "linked", None),  # it has ended well, at once
        ([LINK, {"type": "held"}], "linked", (1, "replica 0 of role 'b' was lost; the application begins again")),
        ([LINK, {"type": "held"}, ENDED], "linked", (7, "b/1 failed: boom")),
        ([LINK, {"type": "held"}, {**ENDED, "code": 0}], "linked", None),
        ([LINK, {"type": "held"}, {"type": "ended", "code": "x"}], "linked", (1, "None")),
    ],
)
def test_what_another_role_says_and_leaves_unsaid(
    leaves_nothing: None, said: list[dict[str, Any]], answer: str, host_event: tuple[int, str] | None
) -> None:
    address = Address("unix", path=str(Path(tempfile.gettempdir(), "r.sock")))

    async def talk(*lines: dict[str, Any]) -> dict[str, Any]:
        reader, writer = await connections.connect(address, None, 5.0)
        for one in lines:
            await messages.send(writer, {"version": messages.VERSION, **one})
        heard = await messages.receive(reader, 10.0)
        writer.close()
        return heard or {}

    async def main() -> None:
        rendezvous = Rendezvous(address, replicas=1)
        first = role_coordinator._MainRole("a", rendezvous, "2", 1)
        await rendezvous.start()
        try:
            heard = await talk(*said)
            assert answer in (heard["type"], heard.get("reason")) or answer in heard["reason"]
            for _ in range(500):
                if not first._links and (host_event is None or len(rendezvous.events.pending)):
                    break
                await asyncio.sleep(0.01)
            assert len(rendezvous.events.pending) == (host_event is not None)
            if host_event is not None:
                came = rendezvous.events.pending[0]
                assert (came.replica, type(came), came.result.consequence) == (0, StopRequested, True)
                assert came.result.code == host_event[0] and came.result.reason.startswith(host_event[1])
                late = await talk(LINK)  # a replica 0 that is started again before this one has gone
                assert late["type"] == "refused" and late["later"]
        finally:
            assert rendezvous._listener is not None
            rendezvous._listener.close()
            await asyncio.sleep(0.05)
            Path(address.path).unlink()

    asyncio.run(main())
