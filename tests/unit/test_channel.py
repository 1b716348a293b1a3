# SPDX-License-Identifier: BSD-3-Clause
"""The channel between replica 0 and a host, whose connections a network breaks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.ports import free_port
from tests.waits import WITHIN, until_async
from torchx_monarch.controller.host_messages import HostCall, ReadOutput, Request, encode_request
from torchx_monarch.controller.host_network import HostNetwork, RendezvousError
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.controller.rendezvous_client import RendezvousClient
from torchx_monarch.controller.roles import RoleClient, RoleServer
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.model.world import World
from torchx_monarch.system.console import Console
from torchx_monarch.transport import credentials, messages
from torchx_monarch.transport.channel import Channel
from torchx_monarch.transport.connections import Address, Identity

SPEC = HostSpec(replicas=2, lease=60.0)
HOST = Registration(1, "node1", 7)


class Proxy:
    """A device of the network between a host and replica 0. It breaks each connection after random numbers of bytes.

    Attributes:
        port: of 127.0.0.1.
        breaks: how many connections it will still break by itself.
        is_open: whether it accepts connections.
    """

    def __init__(self, to: int, seed: int, breaks: int) -> None:
        self.port = free_port()
        self.breaks = breaks
        self.is_open = True
        self._to = to
        self._random = random.Random(seed)
        self._open: list[asyncio.StreamWriter] = []

    async def start(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.is_open:
            return _reset(writer)
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
        self._open += [writer, far_writer]
        await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = self._random.choice((10, 2_000, 5_000, 20_000, 200_000, 1_000_000))
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                passed = data[:left] if self.breaks > 0 else data
                left -= len(passed)
                if writer not in self._open:
                    continue  # cut: what still comes is dropped
                writer.write(passed)
                await writer.drain()
                if left <= 0 and self.breaks > 0:
                    self.breaks -= 1
                    self.cut(is_reset=self._random.random() < 0.5)
        writer.close()

    def cut(self, is_reset: bool = True) -> None:
        """Break all connections."""
        for writer in self._open:
            # A close with bytes that were not read would be a reset.
            _reset(writer) if is_reset else writer.write_eof()
        self._open = []


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    if not writer.transport.is_closing():
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class Job:
    """Replica 0 and another host, which meet through a proxy."""

    def __init__(self, folder: Path, seed: int = 0, breaks: int = 0, spec: HostSpec = SPEC) -> None:
        authority, self.client = credentials.create()
        identity = Identity.from_credentials(authority, {"127.0.0.1"}, str(folder))
        address = Address("tls", "127.0.0.1", free_port())
        self.said: list[str] = []
        self.rendezvous = Rendezvous(HostNetwork(address, spec, identity=identity), say=self.said.append)
        self.proxy = Proxy(address.port, seed, breaks)
        self.network = HostNetwork(Address("tls", "127.0.0.1", self.proxy.port), spec, identity=identity)
        self.asked: list[str] = []
        self.answered = asyncio.Queue[Any]()

    @contextlib.asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        await self.rendezvous.start()
        async with await self.proxy.start():
            yield
            await self.rendezvous.announce(JobResult(0, "the end"), WITHIN)

    @contextlib.asynccontextmanager
    async def joined(self) -> AsyncIterator[RendezvousClient]:
        async with self.started():
            host = await RendezvousClient.join(self.network, HOST, WITHIN)
            self.rendezvous.members.form(self.rendezvous.members.able)
            yield host
            host._channel.close()

    def ask(self, number: int, token: str) -> bool:
        call, member = HostCall(number, ReadOutput(token), [1]), self.rendezvous.members.in_attempt(1)
        call.answers = self.answered
        return member is not None and member.ask(call, encode_request(number, ReadOutput(token)))

    async def handle(self, request: Request[Any]) -> Any:
        assert isinstance(request, ReadOutput)
        self.asked.append(request.token)
        return request.token[::-1]

    @property
    def token(self) -> str:
        member = self.rendezvous.members.get(1)
        assert member is not None and member.channel is not None
        return member.channel.token


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly("more seeds")) for seed in (1, 2, 3))]
)
def test_every_message_arrives_once_and_in_order_whatever_connections_break(tmp_path: Path, seed: int) -> None:
    async def main() -> None:
        job, sizes = Job(tmp_path, seed, breaks=25), random.Random(seed)
        tokens = [f"{number:03d}" + sizes.choice((0, 10, 1_000, 70_000)) * "x" for number in range(300)]
        async with job.joined() as host:
            following = asyncio.ensure_future(host.result(job.handle))
            for number, token in enumerate(tokens):
                assert job.ask(number, token)
                if number % 10 == 0:
                    await until_async(lambda: job.answered.qsize() > number - 20 or following.done(), "the answers")  # noqa: B023
            await until_async(lambda: job.answered.qsize() >= len(tokens) or following.done(), "the last answer")
            assert job.proxy.breaks == 0 and not following.done()
            assert job.asked == tokens
            assert [job.answered.get_nowait() for _ in tokens] == [(1, token[::-1]) for token in tokens]
            assert not job.rendezvous.events.pending
            announcing = asyncio.ensure_future(job.rendezvous.announce(JobResult(3, "the end"), WITHIN))
            result = await asyncio.wait_for(following, WITHIN)
            assert result is not None and result.code == 3
            job.proxy.cut(is_reset=False)
            await asyncio.wait_for(announcing, WITHIN)

    asyncio.run(main())


async def greeted(network: HostNetwork, greeting: messages.Message) -> messages.Message:
    reader, writer = await network.greet(network.rendezvous, greeting)
    try:
        return await messages.receive(reader, WITHIN) or {}
    finally:
        writer.transport.abort()


def test_none_but_the_same_host_process_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        job = Job(tmp_path)
        async with job.joined():
            job.proxy.is_open = False
            job.proxy.cut()
            await until_async(lambda: job.said, "the break")
            direct = HostNetwork(job.rendezvous.network.rendezvous, SPEC, identity=job.network.identity)
            resume: messages.Message = {"type": "resume", "token": job.token, "received": 0}
            for wrong in ({"token": "0" * 32}, {"token": ""}):
                answer = await greeted(direct, {**resume, **wrong})
                assert answer["type"] == "refused" and "it has not registered there" in answer["reason"]
            for received in (1, -1, None):
                assert (await greeted(direct, {**resume, "received": received}))["type"] == "refused"
            client = HostNetwork(direct.rendezvous, SPEC, identity=as_client(job, tmp_path))
            for kind in ("resume", "register", "register-role", "breakpoint", "code", "checkpoint"):
                job.rendezvous.network.handlers.setdefault(kind, Mock())
                answer = await greeted(client, {**resume, "type": kind})
                assert answer["reason"] == f"a client may look at the job and stop it, and not {kind} as a host"

            # Another start of the replica takes the place of one whose connection is broken, which then is lost.
            # It registers when the controller knows of that, which may put it off until the hosts have ended.
            joining = asyncio.ensure_future(RendezvousClient.join(direct, HOST, 0.5))
            lost = await job.rendezvous.events.until_event(asyncio.sleep(WITHIN))
            job.rendezvous.put_off_restarted_hosts()
            with pytest.raises(RendezvousError, match="are ending"):
                await joining
            second = await RendezvousClient.join(
                direct, dataclasses.replace(HOST, world=World(0, 0, 0, (), "", 0, False, "")), WITHIN
            )
            assert lost is not None and lost.replica == 1
            assert lost.result.reason.endswith("Connection reset by peer; its replica has started again")
            assert job.rendezvous.members.registered(1) is not None and resume["token"] != job.token
            assert (await greeted(direct, resume))["type"] == "refused"
            with pytest.raises(RendezvousError, match="has registered already"):
                await RendezvousClient.join(HostNetwork(direct.rendezvous, SPEC, identity=direct.identity), HOST, 0.1)
            second._channel.close()
            # Else a result written to it is answered by a reset, after which replica 0 waits a lease for the host.
            await job.rendezvous.events.until_event(asyncio.sleep(WITHIN))

    asyncio.run(main())


def as_client(job: Job, folder: Path) -> Identity:
    """The identity of the client that has submitted the job."""
    paths = []
    for name, content in (("c", job.client.certificate), ("k", job.client.key), ("a", job.client.authority)):
        (folder / name).write_text(content)
        paths.append(str(folder / name))
    return Identity(paths[0], paths[1], paths[2])


@pytest.mark.parametrize(
    ("is_reset", "reason"),
    [
        (
            True,
            "the network broke its connection: Connection reset by peer; it has not connected again within 1 s (lease)",
        ),
        (False, "its connection broke, and it made no other one within 2 s"),
    ],
    ids=["reset", "closed"],
)
def test_who_does_not_come_back_is_lost(tmp_path: Path, is_reset: bool, reason: str) -> None:
    async def main() -> None:
        job = Job(tmp_path, spec=HostSpec(replicas=2, lease=1.0 if is_reset else 60.0))
        async with job.joined() as host:
            following = asyncio.ensure_future(host.result(job.handle))
            await until_async(lambda: job.ask(1, "x"), "the host")
            await until_async(lambda: not job.answered.empty(), "the answer")
            job.proxy.is_open = False
            job.proxy.cut(is_reset)
            lost = await job.rendezvous.events.until_event(asyncio.sleep(WITHIN))
            assert lost is not None and lost.result.reason == f"host 1 (node1, pid 7) was lost: {reason}"
            assert await asyncio.wait_for(following, WITHIN) is None
            assert host.lost == f"replica 0 was lost: {reason}"

    asyncio.run(main())


def test_a_message_of_the_last_connection_that_comes_beside_the_next_one_is_not_taken_twice() -> None:
    async def main() -> None:
        first, second, writer = asyncio.StreamReader(), asyncio.StreamReader(), Mock(spec=asyncio.StreamWriter)
        said = list[str]()
        channel = Channel(first, writer, SPEC, networked=True, say=said.append)
        for number in (1, 2):
            receiving = asyncio.ensure_future(channel.receive())
            await asyncio.sleep(0)  # until it waits for the message
            first.feed_data(messages.encode({"number": number}))
            if number == 2:
                channel._go_on(second, writer, 0)
                second.feed_data(messages.encode({"number": 2}) + messages.encode({"number": 3}))
                first.feed_eof()
            assert await receiving == {"number": number}
        assert await channel.receive() == {"number": 3}
        assert said == ["it has connected again"], "this end has noticed no break"
        channel.close()

    asyncio.run(main())


def test_a_cut_between_the_first_hosts_of_two_roles_ends_neither(tmp_path: Path) -> None:
    async def main() -> None:
        job, reporter = Job(tmp_path), Reporter(Console(2), None, "b")
        server = RoleServer(job.rendezvous, HostSpec("app", "a", peer_roles=1), reporter)
        network = HostNetwork(job.network.rendezvous, HostSpec("app", "b"), identity=job.network.identity)
        async with job.started():
            client = RoleClient(Rendezvous(network), network.rendezvous, reporter)
            await until_async(lambda: server._arrived, "the other role")
            job.proxy.cut()
            again = "replica 0 of role 'b': it has connected again, after the network broke its connection: "
            await until_async(lambda: "".join(job.said).startswith(again), "the next connection")
            await client.end(JobResult(7, "boom"), WITHIN)
            await until_async(lambda: job.rendezvous.events.pending, "the end of the other role")
            (event,) = job.rendezvous.events.pending
            assert event.result.code == 7 and "b/0 failed: boom" in event.result.reason
            client._connection.cancel()

    asyncio.run(main())


def test_the_first_role_does_not_wait_for_one_that_has_ended_and_resets_its_connection(tmp_path: Path) -> None:
    async def main() -> None:
        job, reporter = Job(tmp_path, spec=HostSpec(lease=1000.0)), Reporter(Console(2), None, "b")
        server = RoleServer(job.rendezvous, HostSpec("app", "a", peer_roles=1), reporter)
        network = HostNetwork(job.network.rendezvous, HostSpec("app", "b"), identity=job.network.identity)
        async with job.started():
            client = RoleClient(Rendezvous(network), network.rendezvous, reporter)
            await until_async(lambda: server._arrived, "the other role")
            await client.end(JobResult(7, "boom"), WITHIN)
            await until_async(lambda: job.rendezvous.events.pending, "the end of the other role")
            ending = asyncio.ensure_future(server.end(JobResult(7, "boom"), WITHIN))
            await asyncio.sleep(0)  # it sends the result, which the other role does not read
            job.proxy.is_open = False
            job.proxy.cut(True)
            client._connection.cancel()
            await ending
            assert not server._links

    asyncio.run(main())
