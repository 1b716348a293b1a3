# SPDX-License-Identifier: BSD-3-Clause
"""The flight recorders of torch in a rank, of several versions of torch, which need no GPU here."""

from __future__ import annotations

import asyncio
import json
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waits import WITHIN, until_async
from torchx_monarch.host.ranks.flight_recorders import FlightRecorders, collect, status
from torchx_monarch.host.ranks.rank_process import Rank
from torchx_monarch.insight.group_calls import GroupStatus
from torchx_monarch.insight.hangs import Fault, RankCollectives, diagnose
from torchx_monarch.system.console import WriterThread

RANK = str(Path(__file__).parent / "stub_torch.py")


def entry(group: str, number: int, name: str, done: bool, key: int = 0) -> dict[str, Any]:
    return {
        "process_group": [group, "default_pg"],
        "pg_id": key,
        "collective_seq_id": number,
        "is_p2p": False,
        "profiling_name": name,
        "input_sizes": [[7]],
        "time_created_ns": number * 10**9,
        "retired": done,
    }


CONFIGS = {"0": "cpu:gloo,cuda:nccl", "1": "cuda:nccl", "2": "cpu:gloo,cuda:gloo"}

GLOO = [
    entry("0", 1, "gloo:barrier", True),
    *(entry("2", number, "gloo:all_reduce", True, 2) for number in (1, 2, 3)),  # of a group that was destroyed
    entry("2", 1, "gloo:all_reduce", False, 5),
]
NCCL = [entry("0", 1, "nccl:all_reduce", True), entry("0", 2, "nccl:all_reduce", False), entry("1", 1, "nccl:x", True)]

TORCH = {
    "2.12": {"_dump_nccl_trace": {"": NCCL}},
    "2.13": {"_dump_nccl_trace": {"": NCCL}, "_dump_fr_trace": {"": GLOO}},
    "2.15": {"_dump_nccl_trace": {"": []}, "_dump_fr_trace": {"": GLOO, "nccl2": NCCL}},
}


class RankOfTorch(Rank):
    """A process with a stub of torch's binding, which has formed its groups, and the host to which it has connected."""

    def __init__(self, folder: Path, torch: str) -> None:
        super().__init__(3, 3, lambda: None)
        self.folder = folder / "attempt_0"
        self.directory = self.folder / "3"
        self.recorders = FlightRecorders(str(folder), WriterThread())
        self._stub = json.dumps({"functions": TORCH[torch], "configs": CONFIGS, "path": self.recorders.path})

    async def __aenter__(self) -> RankOfTorch:
        await self.recorders.start()
        self.process = subprocess.Popen([sys.executable, RANK], stdin=subprocess.PIPE, text=True)
        self.begin(self.process.pid)
        self.release()
        self._say(self._stub)
        await until_async(lambda: self.grouped, "the rank's groups")
        return self

    async def __aexit__(self, *_: object) -> None:
        self.send(signal.SIGKILL)
        await self.drain()
        self.process.communicate(timeout=WITHIN)
        assert self.recorders._server is not None
        self.recorders._server.close()
        await self.recorders._server.wait_closed()

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    async def groups(self) -> dict[str, GroupStatus]:
        answers = await status([self], WITHIN)
        return {group.name: group for group in answers[self.pid]}

    async def fail(self) -> None:
        self._say("fail")
        await until_async(lambda: self.failure, "the failure")

    def dumps(self) -> dict[str, list[dict[str, Any]]]:
        files = sorted((self.folder / "flight_recorder").iterdir())
        return {file.name: pickle.loads(file.read_bytes())["entries"] for file in files}


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="h"))
    (path / "attempt_0").mkdir()
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("torch", TORCH)
def test_each_recorder_is_read(torch: str, folder: Path) -> None:
    async def main() -> None:
        async with RankOfTorch(folder, torch) as rank:
            groups = await rank.groups()
            numbers = {name: (group.enqueued, group.completed) for name, group in groups.items()}
            assert groups["1"].calls == (1.0,)  # the time of number 1
            if torch == "2.12":  # records NCCL alone
                assert numbers == {"0": (2, 1), "1": (1, 1)}
            else:
                assert numbers == {"0 (gloo)": (1, 1), "0 (nccl)": (2, 1), "1": (1, 1), "2": (1, 0)}
            await collect([rank])
            gloo = {} if torch == "2.12" else {"gloo_rank_3": GLOO}
            assert rank.dumps() == {**gloo, "nccl_rank_3": NCCL}
            shutil.rmtree(rank.folder / "flight_recorder")
            await rank.fail()
            assert rank.failure is not None and rank.failure[1] == 5
            assert rank.dumps() == {**gloo, "nccl_rank_3": NCCL}

    asyncio.run(asyncio.wait_for(main(), WITHIN))


def test_a_hang_of_one_recorder_is_named_beside_the_other(folder: Path) -> None:
    """Both count from 1: the other rank has called Gloo's collective of this number, and not NCCL's."""

    async def main() -> None:
        async with RankOfTorch(folder, "2.13") as rank:
            groups = tuple((await rank.groups()).values())
            late = tuple(
                GroupStatus(group.name, group.ranks, 1 if group.name == "0 (nccl)" else 9, 1) for group in groups
            )
            hang = diagnose([RankCollectives(0, 1000.0, groups), RankCollectives(1, 1000.0, late)], 300)
            assert hang is not None and (hang.fault, hang.ranks, hang.group) == (Fault.MISSING, (1,), "0 (nccl)")
            assert hang.describe().startswith("rank 1 has not called nccl:all_reduce, number 2 of group 0 (nccl), in")

    asyncio.run(asyncio.wait_for(main(), WITHIN))
