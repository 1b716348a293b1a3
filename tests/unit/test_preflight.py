# SPDX-License-Identifier: BSD-3-Clause
"""The pre-flight: the facts of a host, their comparison, and what follows from it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from torchx_monarch.command.command import parse
from torchx_monarch.controller.elastic import NodeRange
from torchx_monarch.controller.host_messages import TakeFacts
from torchx_monarch.controller.hosts import JobHosts, JobOptions
from torchx_monarch.controller.preflight import Preflight, Problem, clock_offset, compare
from torchx_monarch.host.preflight import parse_gpus, take_facts
from torchx_monarch.host.ranks.run_spec import RunSpec
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.codec import decode
from torchx_monarch.model.host_facts import HostFacts, ProgramFile, Registration
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.system.console import Console, WriterThread
from torchx_monarch.transport import messages

GOOD = HostFacts(
    {"python": "3.11.7", "torch": "2.13.0", "CUDA": "12.8", "NCCL": "2.27"},
    program=ProgramFile("/x/train.py", 100, "a" * 64),
    paths={"/x": "", "/x/train.py": ""},
    shared_memory=1 << 30,
    open_files=65536,
)
NO_FILE = os.strerror(2)


def problems(*facts: HostFacts, offsets: tuple[float, ...] = ()) -> list[Problem]:
    names = {replica: f"host {replica}" for replica in range(len(facts))}
    return list(compare(names, dict(enumerate(facts)), dict(enumerate(offsets))))


def lines(*facts: HostFacts, offsets: tuple[float, ...] = ()) -> list[str]:
    return [problem.text for problem in problems(*facts, offsets=offsets)]


def with_version(name: str, version: str) -> HostFacts:
    return dataclasses.replace(GOOD, versions={**GOOD.versions, name: version})


def without_cuda() -> HostFacts:
    return dataclasses.replace(GOOD, versions={name: GOOD.versions[name] for name in ("python", "torch", "NCCL")})


def test_hosts_that_are_alike_and_fit() -> None:
    assert lines(GOOD, GOOD, offsets=(0.0, 0.9)) == []
    assert lines(GOOD, offsets=(0.0,)) == []
    bare = HostFacts({})
    assert lines(bare, bare, bare) == []


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ((GOOD, with_version("torch", "2.12.0")), "host 1 has torch 2.12.0, and host 0 2.13.0; install the same torch"),
        ((with_version("torch", "2.12.0"), GOOD, GOOD), "host 0 has torch 2.12.0, and host 1 and host 2 2.13.0; "),
        ((GOOD, with_version("python", "3.12.1")), "host 1 has python 3.12.1, and host 0 3.11.7; "),
        ((GOOD, without_cuda()), "host 1 has CUDA none, and host 0 12.8; "),
        ((GOOD, with_version("NCCL", "2.26")), "host 1 has NCCL 2.26, "),
        (
            (GOOD, dataclasses.replace(GOOD, program=ProgramFile("/x/train.py", 101, "b" * 64))),
            "host 1 has the program /x/train.py of 101 bytes (SHA-256 bbbbbbbbbbbb), and host 0 /x/train.py of 100 ",
        ),
        (
            (GOOD, dataclasses.replace(GOOD, paths={"/x": "Permission denied"})),
            "host 1 cannot read /x: Permission denied; mount it there, or fix its permissions",
        ),
        ((GOOD, dataclasses.replace(GOOD, paths={"/x": NO_FILE})), "host 1 cannot read /x: No such file"),
        ((GOOD, dataclasses.replace(GOOD, shared_memory=1 << 20)), "host 1 has 1 MiB of shared memory free"),
        ((dataclasses.replace(GOOD, open_files=256), GOOD), "host 0 lets a rank open 256 files; "),
        (
            (GOOD, dataclasses.replace(GOOD, gpus=("GPU 3: 70000 of 81559 MiB are in use",))),
            "host 1: GPU 3: 70000 of 81559 MiB are in use by other processes; ",
        ),
        (
            (GOOD, dataclasses.replace(GOOD, versions={}, problem="python: not found")),
            "host 1: the program's interpreter tells no versions: python: not found; ",
        ),
    ],
)
def test_a_host_that_differs_or_is_unfit_is_named(facts: tuple[HostFacts, ...], words: str) -> None:
    (line,) = lines(*facts)
    assert line.startswith(words)
    assert "; " in line


def test_a_path_that_exists_nowhere_is_no_difference() -> None:
    gone = dataclasses.replace(GOOD, paths={"/nosuch": NO_FILE})
    assert lines(gone, gone) == []


def test_a_problem_is_about_the_hosts_that_differ() -> None:
    other = with_version("torch", "2")
    assert [problem.replicas for problem in problems(GOOD, other, GOOD, other)] == [[1, 3]]
    unreadable = dataclasses.replace(GOOD, paths={"/x": "Permission denied"})
    found = problems(unreadable, GOOD, unreadable, GOOD, offsets=(0.0, 3.0))
    assert [problem.replicas for problem in found] == [[0, 2], [1]]


def test_many_hosts_are_not_all_listed() -> None:
    (line,) = lines(*[GOOD] * 100, with_version("torch", "2"))
    assert line.startswith("host 100 has torch 2, and host 0, host 1, host 2 and 97 more 2.13.0; ")


@pytest.mark.parametrize(
    ("clock", "taken", "offset"),
    [(100.5, 0.1, 0.0), (101.0, 0.1, 0.0), (104.0, 0.1, 3.0), (100.05, 0.1, -0.05), (90.0, 0.0, -10.0)],
)
def test_the_offset_of_a_clock_is_the_least_that_is_certain(clock: float, taken: float, offset: float) -> None:
    facts = dataclasses.replace(GOOD, clock=clock, taken=taken)
    assert clock_offset(facts, sent=100.0, received=101.0) == pytest.approx(offset)


class ScriptedHosts:
    """Two hosts; the clock of the second is ahead by ``ahead`` seconds."""

    def __init__(self, ahead: float = 0.0, open_files: int = GOOD.open_files, mode: str = "on") -> None:
        self.options = JobOptions(HostSpec(preflight=mode), NodeRange(2, 2, 1.0), "id", 1.0)
        self.reporter = Reporter(Console(2), None, "trainer")
        self.requests: list[TakeFacts] = []
        self._ahead, self._open_files = ahead, open_files

    async def ask(self, request: TakeFacts, timeout: float | None = None) -> AsyncIterator[Any]:
        self.requests.append(request)
        for replica, ahead in ((1, self._ahead), (0, 0.0)):
            facts = dataclasses.replace(GOOD, clock=time.time() + ahead, open_files=self._open_files)
            yield replica, facts


HOSTS = [Registration(replica, "node", 1, 1) for replica in range(2)]


def checked(hosts: ScriptedHosts, capfd: pytest.CaptureFixture[str], times: int = 1) -> tuple[str, str]:
    """Why the run must not start, and the log."""
    preflight = Preflight(cast(JobHosts, hosts))

    async def run() -> str:
        reasons = [await preflight.check(HOSTS) for _ in range(times)]
        return reasons[0]

    reason = asyncio.run(run())
    WriterThread.finish()
    return reason, capfd.readouterr().err


def test_hosts_are_checked_once(capfd: pytest.CaptureFixture[str]) -> None:
    hosts = ScriptedHosts()
    reason, log = checked(hosts, capfd, times=2)
    assert reason == ""
    assert "[monarch] pre-flight: 2 hosts are fit and alike" in log
    assert hosts.requests == [TakeFacts()]


def test_a_difference_fails_the_run_or_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    reason, log = checked(ScriptedHosts(7.0, open_files=64), capfd)
    assert reason.startswith("pre-flight: the clock of host 1 (node, pid 1) is 7.0 s ahead")
    assert reason.endswith("(and 2 more, see the log)")
    assert "[monarch] pre-flight: host 1 (node, pid 1) lets a rank open 64 files" in log
    reason, log = checked(ScriptedHosts(7.0, mode="warn"), capfd)
    assert reason == "" and "is 7.0 s ahead" in log


def test_nothing_is_asked_when_it_is_off(capfd: pytest.CaptureFixture[str]) -> None:
    hosts = ScriptedHosts(7.0, mode="off")
    assert checked(hosts, capfd) == ("", "")
    assert hosts.requests == []


# -- facts -------------------------------------------------------------------------------------------------------------


def spec(words: list[str], cwd: Path, **environ: str) -> RunSpec:
    command = parse(words, {})
    assert command is not None
    return RunSpec(command, {"PATH": os.environ["PATH"], **environ}, ["torch"], cwd=str(cwd))


def test_the_facts_of_this_host(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("pass\n")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    info = tmp_path / "site" / "torch-9.8.7.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.8.7\n")
    (tmp_path / "site" / "torch").mkdir()
    (tmp_path / "site" / "torch" / "version.py").write_text("debug = False\ncuda: Optional[str] = '12.8'\n")
    path = f"{info.parent}:{loop}:/nosuch"
    facts = take_facts(spec(["torchrun", "train.py"], tmp_path, PYTHONPATH=path))
    assert (facts.versions["torch"], facts.versions["CUDA"], facts.problem) == ("9.8.7", "12.8", "")
    assert facts.program is not None and facts.program.size == 5
    assert facts.paths[str(tmp_path)] == facts.paths[str(tmp_path / "train.py")] == ""
    assert facts.paths[str(loop)].startswith("Too many levels") and facts.paths["/nosuch"] == NO_FILE
    assert abs(facts.clock - time.time()) < 30
    assert decode(HostFacts, messages.decode(messages.encode(vars(facts)))) == facts


def test_an_interpreter_that_fails_is_said(tmp_path: Path) -> None:
    broken = tmp_path / "python3.11"
    broken.write_text("#!/bin/sh\necho 'no such library' >&2\nexit 1\n")
    broken.chmod(0o755)
    facts = take_facts(spec([str(broken), "-m", "train"], tmp_path))
    assert facts.problem == f"{broken}: no such library"
    assert facts.program is None


@pytest.mark.parametrize(
    ("visible", "held"),
    [(None, ["GPU 0", "GPU 2"]), ("2", ["GPU 2"]), ("GPU-aa", ["GPU 0"]), ("1", []), ("", [])],
)
def test_gpus_that_others_use(visible: str | None, held: list[str]) -> None:
    told = "0, GPU-aa11, 40000, 81559\n1, GPU-bb22, 12, 81559\n2, GPU-cc33, 2048, 81559\n3, GPU-dd44, [N/A], [N/A]\n"
    assert [text.partition(":")[0] for text in parse_gpus(told, visible)] == held


def test_a_difference_names_its_host(capfd: pytest.CaptureFixture[str]) -> None:
    preflight = Preflight(cast(JobHosts, ScriptedHosts(7.0)))
    assert preflight.culprit is None
    assert asyncio.run(preflight.check(HOSTS)) and preflight.culprit is HOSTS[1]
