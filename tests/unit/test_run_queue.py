# SPDX-License-Identifier: BSD-3-Clause
"""The runs of an allocation: their queue on replica 0, and a run on a host."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from tests.waits import WITHIN, until_async
from torchx_monarch.command.allocation_spec import AllocationSpec
from torchx_monarch.controller import run_queue
from torchx_monarch.controller.elastic import NodeRange
from torchx_monarch.controller.host_events import HostLost
from torchx_monarch.controller.host_messages import BeginRun, FinishRun, HostRefused, Request, RunBegun
from torchx_monarch.controller.host_network import HostNetwork, Peer, RendezvousError
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.controller.members import Member, MemberState
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.controller.run_queue import _MAX_RUNS, Run, RunQueue
from torchx_monarch.host.code_distribution import HostCode
from torchx_monarch.host.host import Host
from torchx_monarch.host.rank_runs import RankRuns
from torchx_monarch.host.ranks.rank_pool import RankPool
from torchx_monarch.insight import events
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.model.run_request import RunRequest
from torchx_monarch.system.console import Console, WriterThread
from torchx_monarch.transport import messages
from torchx_monarch.transport.connections import Address


class Replica0:
    """The runs on a replica 0."""

    def __init__(self, folder: Path) -> None:
        spec = HostSpec("app", "trainer", replicas=3)
        rendezvous = Rendezvous(HostNetwork(Address("unix", path="/nowhere"), spec))
        hosts = JobHosts(rendezvous, NodeRange(3, 3, 1.0), Reporter(Console(2), None, ""), AsyncMock())
        allocation = AllocationSpec(0.0, "1", ("a", "b"), None)
        self.disk = WriterThread()
        self.runs = RunQueue(hosts, allocation, str(folder), self.disk, lambda: True)

    def submit(self, **more: object) -> None:
        self.runs.submit(RunRequest.from_message({"command": ["python", "x.py"], "queue": True, **more}))


def test_the_refusal_of_a_run_names_the_role_in_the_command_that_ends_the_earlier_one(tmp_path: Path) -> None:
    async def main() -> None:
        replica0 = Replica0(tmp_path)
        replica0.submit()
        with pytest.raises(RendezvousError, match="torchx monarch stop app --role trainer --run 1$"):
            replica0.submit(queue=False)

    asyncio.run(main())


def test_a_run_that_is_too_large_for_a_message_to_a_host_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        replica0 = Replica0(tmp_path)
        request = {"command": ["python", "x.py"], "function": ""}
        room = messages.MAX_MESSAGE - len(messages.encode(request))  # the client's message is not too large
        with pytest.raises(RendezvousError, match="too large: a message of 8388"):
            replica0.submit(function="x" * room)
        replica0.submit(function="x" * (room - 1000))

    asyncio.run(main())


def test_runs_that_wait_hold_no_descriptor_and_are_limited(tmp_path: Path) -> None:
    async def main() -> None:
        replica0 = Replica0(tmp_path)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(1000):
            replica0.submit()
        assert len(os.listdir("/proc/self/fd")) <= before  # what ran before may still close some
        with pytest.raises(RendezvousError, match="1000 runs wait"):
            replica0.submit()
        await replica0.runs.next_run()
        replica0.submit()
        await replica0.runs.close(JobResult(0, "released", stopped=True))

    asyncio.run(main())


def test_a_run_may_end_and_events_may_come_while_its_log_is_opened(tmp_path: Path) -> None:
    async def main() -> None:
        replica0, thaws = Replica0(tmp_path), threading.Event()
        for _ in range(2):
            replica0.submit()
        replica0.disk.call(thaws.wait)
        for _ in range(2):  # an event cancels the wait for the next run
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(replica0.runs.next_run(), 0.01)
        waiting = asyncio.ensure_future(replica0.runs.next_run())
        replica0.runs.end_run(replica0.runs.find(1), JobResult(143, "stopped by its client", stopped=True))
        thaws.set()
        run = await waiting
        assert isinstance(run, Run) and run.number == 2 and replica0.runs.find(1).state == "stopped"
        await replica0.runs.close(JobResult(0, "released", stopped=True))

    asyncio.run(main())


def test_output_of_hosts_is_read_no_faster_than_replica_0_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, read, stalled = "x" * 65535 + "\n", 0, threading.Event()

    async def answer(request: Request[str], replica: int) -> str:
        nonlocal read
        await asyncio.sleep(0)
        if read == 100:
            return ""
        read += 1
        return part

    async def main() -> None:
        replica0 = Replica0(tmp_path)
        monkeypatch.setattr(replica0.runs.hosts, "ask_host", answer)
        replica0.submit()
        run = await replica0.runs.next_run()
        assert isinstance(run, Run) and run.run_log is not None
        run.run_log._writer.call(stalled.wait)  # the disk
        members = replica0.runs.hosts.members
        members.add(Member(Registration(1, "node1", 1), MemberState.ABLE))
        members.form(members.able)
        replica0.runs.begun(run, 1)
        await until_async(lambda: read * len(part) >= 1 << 20, "the output that may wait")
        for _ in range(1000):
            await asyncio.sleep(0)
        assert read * len(part) == 1 << 20
        stalled.set()
        await until_async(lambda: read == 100, "the rest")
        await replica0.runs.close(JobResult(0, "released", stopped=True))

    asyncio.run(main())


def test_a_full_disk_leaves_no_part_of_a_record(tmp_path: Path) -> None:
    """Part of a write fits under RLIMIT_FSIZE. Clients took it for the message of another program."""
    code = """
import asyncio, resource, sys
from torchx_monarch.insight import events
from torchx_monarch.insight.run_log import RunLog

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

async def main():
    async def follow():
        async for lines in log.follow():
            print(b"".join(lines).decode(), end="")

    log = RunLog(sys.argv[1] + "/journal.jsonl", asyncio.get_running_loop())
    following = asyncio.ensure_future(follow())
    for size, text in ((99, "a"), (99, "b" * 99), (resource.RLIM_INFINITY, "c")):
        limit(size)
        log.append({"text": text})
        await log._writer.run(events.append, sys.argv[1] + "/events", text, "")
        for _ in range(9):  # it reads meanwhile
            await asyncio.to_thread(int)
    log.close()
    await following

asyncio.run(main())
"""
    words = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=WITHIN)
    assert done.stdout == '{"text":"a"}\n{"text":"c"}\n'
    assert [event["kind"] for event in events.read(tmp_path / "events")[0]] == ["a", "c"]


def test_an_error_of_a_host_names_the_file_and_has_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "missing")

    class Broken(RankRuns):
        async def _execute(self, request: Request[object]) -> object:
            return open(missing)  # noqa: SIM115

    host = Host(HostSpec(), {}, "here", Console(1), Console(2), str(tmp_path), Reporter(Console(2), None, ""))

    async def main() -> None:
        await Broken(host).handle(FinishRun("token"))

    with pytest.raises(HostRefused, match=f"FileNotFoundError: .*{missing}"):
        asyncio.run(main())
    assert "in _execute" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"program": ["-m", "x"], "function": 3}, "function"),
        ({"command": ["x.py", "a\0b"]}, r"'a\\x00b'.* NUL"),
        ({"env": {"BIG": "x" * (1 << 17)}}, "cannot start: variable 'BIG' has 131,077 bytes"),
    ],
)
def test_a_wrong_run_is_refused(message: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        RunRequest.from_message(message)


def test_all_runs_that_are_remembered_fit_into_a_message() -> None:
    """A rank writes the reason."""
    request = RunRequest.from_message({"program": ["train.py"], "by": "me@node0", "cwd": "/home/me/work"})
    run = Run(1, request, result=JobResult(1, "\N{FIRE}" * 9000))
    assert len(messages.encode(run.to_json())) * _MAX_RUNS < messages.MAX_MESSAGE


def test_the_end_of_a_queued_run_leaves_the_timeout_of_the_running_one(tmp_path: Path) -> None:
    async def main() -> None:
        replica0 = Replica0(tmp_path)
        replica0.submit(timeout=0.01)
        replica0.submit()
        running = await replica0.runs.next_run()
        assert isinstance(running, Run)
        replica0.runs.end_run(replica0.runs.find(2), JobResult(143, "stopped", stopped=True))
        await until_async(lambda: replica0.runs.hosts.events.pending, "the end of the run by its timeout")
        await replica0.runs.close(JobResult(0, "released", stopped=True))

    asyncio.run(main())


@pytest.mark.parametrize("is_job", [False, True], ids=["client", "job"])
def test_the_log_of_a_run_has_events_for_a_client_that_is_a_job(tmp_path: Path, is_job: bool) -> None:
    async def main() -> None:
        replica0 = Replica0(tmp_path)
        replica0.submit(ends_with_client=is_job)
        await replica0.runs.next_run()
        await replica0.runs.close(JobResult(0, "released", stopped=True))

    asyncio.run(main())
    WriterThread.finish()
    records = map(json.loads, (tmp_path / "run_1/journal.jsonl").read_text().splitlines())
    assert [record["type"] for record in records] == ["run", "phase", *["event"] * is_job, "result"]


JOB: dict[str, object] = {"type": "run", "command": ["python", "x.py"], "queue": True, "ends_with_client": True}


async def connect(greeting: dict[str, object], network: bool = False) -> tuple[Peer, socket.socket]:
    """Return a connection to a client as replica 0 has it, and the client's end."""
    if not network:
        own, client = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            client, (own, _) = socket.create_connection(server.getsockname()), server.accept()
    return Peer(greeting, *await asyncio.open_connection(sock=own)), client


def test_a_run_of_a_job_ends_with_its_last_client(tmp_path: Path) -> None:
    async def main() -> None:
        runs = Replica0(tmp_path).runs
        clients = [await connect(JOB) for _ in range(2)]
        clients[0][0].writer.close()  # it is gone before it is told the number of its run
        for peer, _ in clients:
            asyncio.ensure_future(runs._run(peer))
        await until_async(lambda: len(runs._known) == 2 and runs.find(1).state == "stopped", "the end of the first run")
        clients.append(await connect({"run": 2}))
        following = asyncio.ensure_future(runs._follow(clients[2][0]))
        await until_async(lambda: runs.find(2).clients == 2, "two clients of the second run")
        clients[1][1].close()
        await until_async(lambda: runs.find(2).clients == 1, "the loss of one of them")
        await asyncio.sleep(0)
        assert runs.find(2).state == "queued"
        clients[2][1].close()
        await following
        await until_async(lambda: runs.find(2).state == "stopped", "the end of the second run")
        for peer, client in clients:
            peer.writer.close()
            client.close()

    asyncio.run(main())


def test_a_client_over_a_network_may_connect_again_before_its_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        runs = Replica0(tmp_path).runs

        async def lose(greeting: dict[str, object], limit: float) -> None:
            monkeypatch.setattr(run_queue, "_CLIENT_TIMEOUT", limit)
            peer, client = await connect(greeting, network=True)
            serving = asyncio.ensure_future((runs._follow if runs._known else runs._run)(peer))
            await until_async(lambda: [run.clients for run in runs._known] == [1], "a client of the run")
            client.close()
            await serving
            peer.writer.close()
            await asyncio.sleep(0)

        await lose(JOB, WITHIN)
        assert runs.find(1).state == "queued", "it may connect again"
        await lose({"run": 1}, 0.0)
        await until_async(lambda: runs.find(1).state == "stopped", "the end of the run")

    asyncio.run(main())


def test_an_event_ends_the_wait_for_a_run_also_when_a_client_leaves_meanwhile(tmp_path: Path) -> None:
    """A cancelled ``asyncio.wait_for`` whose future is done goes on, until Python 3.12."""

    async def main(steps: int) -> None:
        replica0 = Replica0(tmp_path)
        replica0.runs.idle_timeout = 600.0
        events, event = replica0.runs.hosts.events, HostLost(1, JobResult(1, "lost"))
        waiting = asyncio.ensure_future(events.until_event(replica0.runs.next_run()))
        await asyncio.wait([waiting], timeout=0.01)
        events.post(event)
        for _ in range(steps):
            await asyncio.sleep(0)
        with replica0.runs.in_use():
            pass
        assert await asyncio.wait_for(waiting, WITHIN) is event

    for steps in range(5):
        asyncio.run(main(steps))


def test_hosts_to_which_a_client_sends_its_code_are_not_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        replica0 = Replica0(tmp_path)
        replica0.runs.idle_timeout = 1.0  # the client's request comes before, also on a busy machine
        waiting = asyncio.ensure_future(replica0.runs.next_run())

        async def answer_late(request: Request[bool]) -> list[bool]:
            await asyncio.wait([waiting], timeout=2.0)  # a slow link
            return [waiting.done()]

        monkeypatch.setattr(replica0.runs.hosts, "broadcast", answer_late)
        own, client = socket.socketpair()
        streams = await asyncio.open_connection(sock=own)
        peer = Peer({"type": "sync", "path": "x"}, *streams)
        serving = asyncio.ensure_future(
            HostCode(str(tmp_path / "code"), HostNetwork(Address("unix", path="/nowhere"))).serve_client(
                replica0.runs, peer
            )
        )
        reader, writer = await asyncio.open_connection(sock=client)
        answer = await messages.receive(reader, WITHIN)
        idle = await asyncio.wait_for(waiting, WITHIN)
        writer.close()
        await serving
        streams[1].close()
        assert answer == {"type": "shared", "shared": False}, "they have ended while the client was sending"
        assert isinstance(idle, JobResult) and idle.stopped, "the idle timeout counts again"

    asyncio.run(main())


def test_a_request_to_begin_a_run_that_is_repeated_during_the_first_begins_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkouts: list[str] = []

    async def checkout(code: HostCode, tree_hash: str, workspace: str) -> str:
        checkouts.append(tree_hash)
        await asyncio.sleep(0)
        return str(tmp_path)

    async def start(pool: RankPool, nproc: str) -> int:
        return 1

    monkeypatch.setattr(HostCode, "checkout", checkout)
    monkeypatch.setattr(RankPool, "start", start)

    async def main() -> None:
        console = Console(2)
        spec = HostSpec(command=("python", "-m", "torchx_monarch.hosts", "--", "python", "-c", "0"))
        host = Host(spec, {}, "here", console, console, str(tmp_path), Reporter(console, None, ""), str(tmp_path))
        runs = RankRuns(host)
        runs.parse()
        host.network = HostNetwork(Address("unix", path="/nowhere"))
        begin = BeginRun(1, "token", RunRequest(("python", "-c", "0"), None, code="tree"))
        first, second = await asyncio.gather(runs.handle(begin), runs.handle(begin))
        assert isinstance(first, RunBegun) and first == second
        assert checkouts == ["tree"]
        await runs.handle(FinishRun("token"))

    asyncio.run(main())


def test_runs_are_numbered_after_those_of_an_earlier_start(tmp_path: Path) -> None:
    """Ranks can write to its log folder, so that not every name there is one of a run."""
    for name in ("run_2", "run_²", "run_99999999999"):
        (tmp_path / name).mkdir()

    async def main() -> None:
        replica0 = Replica0(tmp_path)
        replica0.submit()
        assert replica0.runs.find(None).number == 3
        await replica0.runs.close(JobResult(0, "released", stopped=True))

    asyncio.run(main())
