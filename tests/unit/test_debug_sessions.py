# SPDX-License-Identifier: BSD-3-Clause
"""Ranks in breakpoints: the connections of hosts and clients on replica 0, and those of ranks on a host."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.waits import until_async
from torchx_monarch.cli import debug, exit_codes
from torchx_monarch.cli.debug import Breakpoint
from torchx_monarch.controller.host_network import Peer, RendezvousError, Streams
from torchx_monarch.controller.rank_clients import DebugSessions
from torchx_monarch.host.ranks import rank_debugger
from torchx_monarch.host.worker_loops import RankRelay
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.transport import connections, messages

GREETING = {"type": "breakpoint", "rank": 1, "pid": 7, "file": "/x/train.py", "line": 3, "function": "f", "wait": 9.0}


async def pair() -> tuple[Streams, Streams]:
    near, far = socket.socketpair()
    return await asyncio.open_unix_connection(sock=near), await asyncio.open_unix_connection(sock=far)


async def close(*writers: asyncio.StreamWriter) -> None:
    for writer in writers:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def test_messages_are_passed_on_between_a_host_and_one_client() -> None:
    said: list[str] = []

    async def run() -> None:
        hosts = mock.Mock(**{"reporter.report": lambda _, text, **__: said.append(text)})
        hosts.spec = HostSpec("app", "trainer")
        sessions = DebugSessions(hosts, contextlib.nullcontext)
        host, own = await pair()
        serving = asyncio.ensure_future(sessions.handlers["breakpoint"](Peer(GREETING, *own)))
        (reader, writer), far = await pair()
        await asyncio.sleep(0)
        await sessions.handlers["breakpoints"](Peer({}, *far))
        (listed,) = (await messages.receive(reader) or {})["ranks"]
        assert listed == {**GREETING, "attached": False}
        debugged = asyncio.ensure_future(
            sessions.handlers["debug"](Peer({"type": "debug", "rank": 1, "rows": 5}, *far))
        )
        assert await messages.receive(host[0]) == {"type": "attach", "rank": 1, "rows": 5}
        assert (await messages.receive(reader) or {})["type"] == "attached"
        for wrong, why in [(1, "debugged by another"), (2, "waits in no breakpoint"), ("1", "waits in no breakpoint")]:
            with pytest.raises(RendezvousError, match=why):
                await sessions.handlers["debug"](Peer({"rank": wrong}, *far))
        await messages.send(writer, {"type": "input", "data": "n\r"})
        assert await messages.receive(host[0]) == {"type": "input", "data": "n\r"}
        await messages.send(host[1], {"type": "output", "data": "(Pdb) "})
        assert await messages.receive(reader) == {"type": "output", "data": "(Pdb) "}
        writer.close()
        assert await messages.receive(host[0]) is None
        host[1].close()
        await until_async(lambda: len(said) >= 3, "three lines")
        await asyncio.gather(serving, debugged)
        await close(writer, far[1], host[1], own[1])

    asyncio.run(run())
    assert (
        said[0] == "rank 1 waits at train.py:3 in f for 9 s. Debug it: torchx monarch debug app --role trainer --rank 1"
    )
    assert said[1:] == ["a debugger is attached to rank 1", "rank 1 goes on: the connection of its debugger broke"]


@pytest.mark.parametrize("is_rank", [True, False])
def test_a_process_goes_on_if_it_is_no_rank_or_replica_0_is_not_reached(tmp_path: Path, is_rank: bool) -> None:
    said: list[str] = []
    asked: list[Any] = []

    async def connect(greeting: messages.Message) -> Streams:
        asked.append(greeting)
        raise connections.ConnectError("nobody listens")

    path = str(tmp_path / "attach")
    host = mock.Mock(options=mock.Mock(debug_wait=5.0, peers="", role="r"), environ={}, attach_socket=path)
    host.reporter.line, host.network.connect = said.append, connect

    async def run() -> None:
        served = RankRelay(host)
        await served.start()
        reader, writer = await asyncio.open_unix_connection(path)
        rank = b"3" if is_rank else b'"x"'
        writer.write(b'{"type": "breakpoint", "file": ["a"], "line": "b", "rank": %s, "pid": 7}\n' % rank)
        assert await reader.read() == b""
        await close(writer)
        assert served._server is not None
        served._server.close()
        await asyncio.sleep(0.01)
        Path(path).unlink(missing_ok=True)  # from Python 3.13 on the server has removed it

    asyncio.run(run())
    place = {"file": "['a']", "line": 0, "function": "None"}  # of their types, whatever the program sends
    sent = {"type": "breakpoint", "rank": 3, "pid": os.getpid(), "wait": 5.0, **place}
    assert asked == ([sent] if is_rank else [])
    assert said == (["rank 3 goes on without a debugger: replica 0 is not reached: nobody listens"] if is_rank else [])


@pytest.mark.parametrize(
    ("ranks", "rank", "code", "shown"),
    [
        ([], None, exit_codes.UNAVAILABLE, "no rank waits in a breakpoint"),
        ([0, 1], None, exit_codes.USAGE, "name one of them: --rank K"),
        ([1], None, exit_codes.USAGE, "a debugger needs a terminal"),
        ([0, 1], 1, exit_codes.USAGE, "a debugger needs a terminal"),
    ],
)
def test_which_rank_is_debugged(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ranks: list[int],
    rank: int | None,
    code: int,
    shown: str,
) -> None:
    found = [Breakpoint(rank, 7, "/x/train.py", 3, "f", False) for rank in ranks]
    monkeypatch.setattr(debug, "list_breakpoints", lambda hosts: found)
    monkeypatch.setattr(os, "isatty", lambda descriptor: False)
    args = argparse.Namespace(handle="monarch_local://torchx/app", role="", address="unix:/x", rank=rank, json=False)
    with pytest.raises(exit_codes.CommandError, match=shown) as caught:
        debug.run(args)
    output = capsys.readouterr()
    assert caught.value.exit_code == code
    assert ("/x/train.py:3" in output.out) == (len(ranks) > 1 and rank is None)


@pytest.mark.parametrize("message", [b"[1]\n", b"no JSON\n"])
def test_an_unexpected_message_ends_the_terminal_of_a_rank(message: bytes) -> None:
    near, far = socket.socketpair()
    terminal = rank_debugger._Terminal(near, {"kind": "dumb", "rows": "many", "columns": 1e400})
    with far, far.makefile("rb") as answers:
        far.sendall(message)
        assert b'"type": "end"' in answers.read()
    assert terminal.is_hung_up
    terminal.close()
