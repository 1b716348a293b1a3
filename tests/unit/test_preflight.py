# SPDX-License-Identifier: BSD-3-Clause
"""The pre-flight: the facts of a host, their comparison, and what follows from it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, cast

import pytest

from torchx_monarch.command.command import parse
from torchx_monarch.controller.host_messages import TakeFacts
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.controller.members import Member, Members, MemberState
from torchx_monarch.controller.preflight import check, compare
from torchx_monarch.host.rank_runs import take_facts
from torchx_monarch.host.ranks.run_spec import RunSpec
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.codec import decode
from torchx_monarch.model.host_facts import PROGRAM, HostFacts, Registration
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.system.console import Console, WriterThread
from torchx_monarch.transport import messages

GOOD = {"python": "3.11.7", "torch": "2.13.0", "CUDA": "12.8", "NCCL": "2.27", PROGRAM: "of SHA-256 aaaaaaaaaaaa"}
OTHER_FILE = {**GOOD, PROGRAM: "of SHA-256 bbbbbbbbbbbb"}


def lines(*facts: HostFacts) -> list[str]:
    return list(compare({replica: f"host {replica}" for replica in range(len(facts))}, dict(enumerate(facts))))


def with_version(name: str, version: str) -> HostFacts:
    return {**GOOD, name: version}


def without_cuda() -> HostFacts:
    return {name: value for name, value in GOOD.items() if name != "CUDA"}


def test_hosts_that_are_alike() -> None:
    assert lines(GOOD, GOOD) == lines(GOOD) == []
    assert lines({}, {}, {}) == []


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ((GOOD, with_version("torch", "2.12.0")), "host 1 has torch 2.12.0, and host 0 2.13.0; install the same torch"),
        ((with_version("torch", "2.12.0"), GOOD, GOOD), "host 0 has torch 2.12.0, and host 1 and host 2 2.13.0; "),
        ((GOOD, with_version("python", "3.12.1")), "host 1 has python 3.12.1, and host 0 3.11.7; "),
        ((GOOD, without_cuda()), "host 1 has CUDA none, and host 0 12.8; "),
        ((GOOD, with_version("NCCL", "2.26")), "host 1 has NCCL 2.26, "),
        (
            (GOOD, OTHER_FILE),
            "host 1 has the program of SHA-256 bbbbbbbbbbbb, and host 0 of SHA-256 aaaaaaaaaaaa; copy the same file ",
        ),
        ((GOOD, {PROGRAM: GOOD[PROGRAM]}), "the imports of host 1 have failed; see the log"),
    ],
)
def test_a_host_that_differs_is_named(facts: tuple[HostFacts, ...], words: str) -> None:
    (line,) = lines(*facts)
    assert line.startswith(words)
    assert "; " in line


def test_a_problem_is_about_the_hosts_that_differ() -> None:
    other = with_version("torch", "2")
    assert [line.partition(" have ")[0] for line in lines(GOOD, other, GOOD, other)] == ["host 1 and host 3"]


def test_many_hosts_are_not_all_listed() -> None:
    (line,) = lines(*[GOOD] * 100, with_version("torch", "2"))
    assert line.startswith("host 100 has torch 2, and host 0, host 1, host 2 and 97 more 2.13.0; ")


class ScriptedHosts:
    """Two hosts; the second one may have another version of torch, and another script."""

    def __init__(self, torch: str = GOOD["torch"], mode: str = "on") -> None:
        self.spec = HostSpec(preflight=mode)
        self.reporter = Reporter(Console(2), None, "trainer")
        self.requests: list[TakeFacts] = []
        self.members = Members(2)
        for replica in range(2):
            self.members.add(Member(Registration(replica, "node", 1), MemberState.ABLE))
        self.members.form(self.members.able)
        self._other = with_version("torch", torch)
        if self._other != GOOD:
            self._other = {**OTHER_FILE, "torch": torch}

    async def ask(self, request: TakeFacts, timeout: float | None = None) -> dict[int, Any]:
        self.requests.append(request)
        return {1: self._other, 0: GOOD}


def checked(hosts: ScriptedHosts, capfd: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Why the run must not start, and the log."""
    reason = asyncio.run(check(cast(JobHosts, hosts)))
    WriterThread.finish()
    return reason, capfd.readouterr().err


def test_hosts_that_are_alike_may_start(capfd: pytest.CaptureFixture[str]) -> None:
    reason, log = checked(ScriptedHosts(), capfd)
    assert reason == "" and "[monarch] pre-flight: 2 hosts are alike" in log


def test_a_difference_fails_the_run_or_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    reason, log = checked(ScriptedHosts("2"), capfd)
    assert reason.startswith("pre-flight: host 1 (node, pid 1) has the program of SHA-256 bbbbbbbbbbbb, and host 0 (")
    assert reason.endswith("(and 1 more, see the log)")
    assert "[monarch] pre-flight: host 1 (node, pid 1) has torch 2, and host 0 (node, pid 1) 2.13.0; " in log
    reason, log = checked(ScriptedHosts("2", mode="warn"), capfd)
    assert reason == "" and "has torch 2, " in log


def test_nothing_is_asked_when_it_is_off(capfd: pytest.CaptureFixture[str]) -> None:
    hosts = ScriptedHosts("2", mode="off")
    assert checked(hosts, capfd) == ("", "")
    assert hosts.requests == []


# -- facts -------------------------------------------------------------------------------------------------------------


def spec(words: list[str], cwd: Path, **environ: str) -> RunSpec:
    command = parse(words, {})
    assert command is not None
    return RunSpec(command, {"PATH": os.environ["PATH"], **environ}, ["torch"], cwd=str(cwd))


def test_the_facts_of_this_host(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("pass\n")
    facts = take_facts(spec(["torchrun", "train.py"], tmp_path), {"torch": "9.8.7"})
    assert facts["torch"] == "9.8.7" and len(facts[PROGRAM]) == 23
    assert decode(dict[str, str], messages.decode(messages.encode(dict(facts)))) == facts
    assert PROGRAM not in take_facts(spec(["torchrun", "-m", "train"], tmp_path), {})
