# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The runs of an allocation, as its leader tells the other hosts of them and another leader goes on with them."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest

from tests.waits import WITHIN, until_async
from torchx_monarch.controller.host_events import RunEndRequested
from torchx_monarch.controller.host_messages import BeginRun, FileProbed, FinishRun, Request, RunBegun
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.controller.run_queue import RunQueue
from torchx_monarch.host.code_distribution import HostCode
from torchx_monarch.host.live_runs import LiveRuns
from torchx_monarch.host.ranks.rank_pool import RankPool
from torchx_monarch.host.workload import Host
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.codec import DecodeError
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.model.job_record import AttemptProgress, JobRecord
from torchx_monarch.model.job_result import JobResult, RankExit
from torchx_monarch.model.run_request import RunRequest
from torchx_monarch.model.session_record import SessionRecord
from torchx_monarch.system.console import Console
from torchx_monarch.transport import messages
from torchx_monarch.transport.connections import Address

PROGRESS = AttemptProgress(-1, uncounted=0, restarts_left=0, rank_restarts=0, first_log_attempt=0)
CAUSE = RankExit(3, 1, 0, "here", 7, 2, 5.0, error={"message": "long"})


class Leader:
    """The runs on one leader."""

    def __init__(self, folder: Path, replica: int = 0, before: SessionRecord | None = None) -> None:
        address = Address("unix", path="/nowhere")
        self.rendezvous = Rendezvous(address, 3, leader=replica, term=replica, hands_over=True)
        logs = str(folder / str(replica))
        self.runs = RunQueue(self.rendezvous, "app", "trainer", logs, ("a", "b"), 0.0, lambda: True, before)

    def submit(self, **more: object) -> None:
        self.runs.submit(RunRequest.from_message({"command": ["python", "x.py"], "queue": True, **more}))

    @property
    def session(self) -> SessionRecord:
        """What the other hosts decode."""
        session = self.rendezvous.record._session
        record = JobRecord(0, 0, (1, 2), (0, 1), PROGRESS, session=session)
        decoded = JobRecord.from_json(json.loads(json.dumps(record.to_json())))
        assert decoded == record and decoded.session is not None
        return decoded.session


def test_a_leader_goes_on_with_the_runs_of_another(tmp_path: Path) -> None:
    async def main() -> None:
        first = Leader(tmp_path)
        for number in range(1, 5):
            first.submit(env={"NUMBER": str(number)}, timeout=1000)
        first.runs.finish(first.runs.begin(), JobResult(2, "rank 3 failed", CAUSE), [])
        running = first.runs.begin()
        first.runs.end_run(running, JobResult(143, "stopped", stopped=True))
        session = first.session
        assert [bool(run.request.env) for run in session.runs] == [False, True, True, True]
        second = Leader(tmp_path, 1, session)
        assert [run["state"] for run in second.runs.runs()] == ["failed", "running", "queued", "queued"]
        assert second.runs.find(1).last_record == first.runs.find(1).last_record
        current = second.runs.current
        assert current is not None and (current.token, current.request.env) == (running.token, {"NUMBER": "2"})
        (event,) = second.rendezvous.events.pending
        assert isinstance(event, RunEndRequested) and event.result.reason == "stopped"
        second.submit()
        assert second.runs.find(5).state == "queued"
        for each in (first, second):
            await each.runs.close(JobResult(0, "released", stopped=True))

    asyncio.run(main())


def test_the_end_of_a_queued_run_leaves_the_timeout_of_the_running_one(tmp_path: Path) -> None:
    async def main() -> None:
        leader = Leader(tmp_path)
        leader.submit(timeout=0.01)
        leader.submit()
        running = leader.runs.begin()
        leader.runs.end_run(leader.runs.find(2), JobResult(143, "stopped", stopped=True))
        await until_async(lambda: running.ending, "the end of the run by its timeout")
        await leader.runs.close(JobResult(0, "released", stopped=True))

    asyncio.run(main())


def test_hosts_to_which_a_client_sends_its_code_are_not_idle(tmp_path: Path) -> None:
    async def main() -> None:
        leader = Leader(tmp_path)
        leader.runs.idle_timeout = 0.05
        waiting = asyncio.ensure_future(leader.runs.run_wanted())

        async def answer_late(request: Request) -> list[FileProbed]:
            await asyncio.wait([waiting], timeout=0.5)  # a slow link
            return [FileProbed(0, waiting.done())]

        leader.runs.broadcast = answer_late
        own, client = socket.socketpair()
        streams = await asyncio.open_connection(sock=own)
        serving = asyncio.ensure_future(
            HostCode(str(tmp_path / "code"), "host 0").serve_client(leader.runs, {}, *streams)
        )
        reader, writer = await asyncio.open_connection(sock=client)
        await messages.send(writer, {"type": "probe", "path": "x", "text": "x"})
        answer = await messages.receive(reader, WITHIN)
        wanted = await asyncio.wait_for(waiting, WITHIN)
        writer.close()
        await serving
        streams[1].close()
        assert answer == {"type": "shared", "shared": False}, "they have ended while the client was sending"
        assert not wanted, "the idle timeout counts again"

    asyncio.run(main())


def test_a_request_to_begin_a_run_that_is_repeated_during_the_first_begins_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkouts: list[str] = []

    async def checkout(code: HostCode, tree_hash: str, workspace: str) -> str:
        checkouts.append(tree_hash)
        await asyncio.sleep(0)
        return str(tmp_path)

    async def fetch(code: HostCode, tree_hash: str, connect: object) -> None:
        """The code is on this host."""

    async def start(pool: RankPool, nproc: str) -> int:
        return 1

    monkeypatch.setattr(HostCode, "checkout", checkout)
    monkeypatch.setattr(HostCode, "fetch", fetch)
    monkeypatch.setattr(RankPool, "start", start)

    async def main() -> None:
        console = Console(2)
        spec = HostSpec(command=("python", "-m", "torchx_monarch.hosts", "--", "python", "-c", "0"))
        host = Host(spec, {}, "here", console, console, str(tmp_path), Reporter(console, None, ""), str(tmp_path))
        runs = LiveRuns(host)
        runs.parse()
        begin = BeginRun(1, "token", RunRequest(("python", "-c", "0"), None, code="tree", synced=True))
        first, second = await asyncio.gather(runs.handle(begin), runs.handle(begin))
        assert isinstance(first, RunBegun) and first == second
        assert checkouts == ["tree"]
        await runs.handle(FinishRun("token"))

    asyncio.run(main())


def test_a_leader_numbers_runs_after_those_of_an_earlier_start(tmp_path: Path) -> None:
    """Ranks can write to its log folder, so that not every name there is one of a run."""
    for name in ("run_2", "run_²", "run_99999999999"):
        (tmp_path / "0" / name).mkdir(parents=True)

    async def main() -> None:
        leader = Leader(tmp_path)
        leader.submit()
        assert leader.runs.begin().number == 3
        await leader.runs.close(JobResult(0, "released", stopped=True))

    asyncio.run(main())


def test_the_runs_of_a_superseded_leader_have_not_ended(tmp_path: Path) -> None:
    async def main() -> None:
        leader = Leader(tmp_path)
        leader.submit()
        run = leader.runs.begin()
        leader.rendezvous.superseded = True
        await leader.runs.close(JobResult(1, "another host leads"))
        assert run.result is None

    asyncio.run(main())


def test_requests_beyond_the_size_of_a_message_are_not_told(tmp_path: Path) -> None:
    async def main() -> None:
        leader = Leader(tmp_path)
        for size in (3_000_000, 3_000_000, 1000):
            leader.submit(env={"LONG": "x" * size})
        assert [run.number for run in leader.session.runs] == [1]
        await leader.runs.close(JobResult(0, "released", stopped=True))

    asyncio.run(main())


@pytest.mark.parametrize("session", [1, {}, {"last": 1, "ended": 0, "runs": [{"number": "1"}]}])
def test_a_damaged_session_is_refused(session: object) -> None:
    with pytest.raises(DecodeError):
        JobRecord.from_json({**JobRecord(0, 0, (1,), (0,), PROGRESS).to_json(), "session": session})
