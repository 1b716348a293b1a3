# SPDX-License-Identifier: BSD-3-Clause
"""Runs of an allocation: hosts that do not answer, connections that break, Ctrl-C to a run, and its result."""

from __future__ import annotations

import argparse
import io
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NoReturn, cast

import pytest

import torchx_monarch
from tests.unit.test_foreground import ImpatientTerminal
from tests.waits import until
from torchx_monarch.cli import exec as exec_command
from torchx_monarch.client.connection import Target
from torchx_monarch.client.hosts import Hosts, _AppState
from torchx_monarch.client.result import RankOutput, RankResult, RunResult
from torchx_monarch.client.run import Collector, RunHandle, collect_with_interrupts
from torchx_monarch.exceptions import AllocationError, UnreachableError
from torchx_monarch.system.termination import signal_of, termination

OUTPUT = {"type": "output", "rank": 0, "stream": "stdout", "text": "[default0]:out\n", "prefix": "[default0]:"}
RESULT = {
    "type": "result",
    "run": 1,
    "exit_code": 3,
    "reason": "rank 0 failed",
    "stopped": False,
    "cause": None,
    "started": 10.0,
    "seconds": 2.5,
    "code": "ab",
}
ERROR = AllocationError("h://torchx/a has ended (SUCCEEDED)")


def test_hosts_that_do_not_answer_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object) -> NoReturn:
        raise UnreachableError("a:29400: Connection timed out")

    monkeypatch.setattr(Target, "from_handle", unreachable)
    monkeypatch.setattr(Hosts, "check_alive", lambda self: setattr(self, "_app_state", _AppState("RUNNING")))
    monkeypatch.setattr("torchx_monarch.client.hosts._SHOW_ERROR_AFTER", -1.0)
    monkeypatch.setattr(exec_command, "_PS_TIMEOUT", 0.0)
    with pytest.raises(AllocationError, match=r"after 0 s: waiting for the hosts .RUNNING.: a:29400: Connection timed"):
        exec_command.CmdPs().run(argparse.Namespace(handle="h://torchx/a", role="", address="", json=False))


class BreakingLink:
    """A connection that has some records and then breaks."""

    def __init__(self, *records: dict[str, Any]) -> None:
        self._records = [*records, None]

    def receive(self, timeout: float | None = None) -> dict[str, Any] | None:
        return self._records.pop(0)

    def close(self) -> None:
        pass


class LostHosts:
    """Hosts whose connections break, and which have ended in the end."""

    def __init__(self, *links: BreakingLink) -> None:
        self._links = list(links)
        self.asked: list[dict[str, Any]] = []

    def open(self, greeting: dict[str, Any], wait: bool = True) -> BreakingLink:
        self.asked.append(greeting)
        if not self._links:
            raise ERROR
        return self._links.pop(0)


def test_followed_lines_go_on_after_a_break_and_name_the_end_of_the_hosts() -> None:
    accepted = {"type": "accepted", "run": 1, "before": 0}
    second = {**OUTPUT, "text": "two\n"}
    lost = LostHosts(BreakingLink(accepted, OUTPUT), BreakingLink(accepted, OUTPUT, second))
    job = torchx_monarch.SPMDJob.__new__(torchx_monarch.SPMDJob)
    job._role_hosts = cast(Hosts, lost)
    lines = job.logs(0, follow=True)
    assert [next(lines), next(lines)] == ["[default0]:out", "two"]
    with pytest.raises(UnreachableError, match="run 1 lost its connection: .* has ended"):
        next(lines)
    assert [request["run"] for request in lost.asked] == [None, 1, 1]


class RunningRun:
    """The records of a run that ends when it is killed, and its hosts, which note what they are asked."""

    run = 1

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self._killed = threading.Event()

    def ask(self, request: dict[str, Any], wait: bool) -> None:
        self.asked.append(request)
        if request["kill"]:
            self._killed.set()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        assert self._killed.wait(30)
        yield RESULT

    def close(self) -> None:
        pass


def has_result(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None]) -> None:
    """Have something happen each time that a run's result is awaited."""
    wait = futures.wait

    def await_result(runs: Any, timeout: float) -> None:
        meanwhile()
        wait(runs, 30)

    monkeypatch.setattr(futures, "wait", await_result)


@pytest.mark.usefixtures("plain_signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("is_held", [False, True])
def test_a_signal_stops_a_run_also_one_that_came_before_its_number(
    number: signal.Signals, is_held: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    running: Any = RunningRun()

    def meanwhile() -> None:
        if not running.asked:
            signal.raise_signal(number)
        elif len(running.asked) == 1:
            signal.raise_signal(signal.SIGHUP)  # a closed terminal sends it twice
            raise KeyboardInterrupt

    has_result(monkeypatch, meanwhile)
    try:
        termination.install()
        if is_held:
            termination.hold()
            signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt) as ended:
            collect_with_interrupts(running, running, Collector("stream"))
    finally:
        termination.remove()
    assert signal_of(ended.value) == number
    assert [request["kill"] for request in running.asked] == [False, True]
    assert f"stopping run 1 ({number.name}); Ctrl-C again kills it" in capsys.readouterr().err


@pytest.mark.usefixtures("plain_signals")
def test_a_second_ctrl_c_kills_a_run_before_its_effect_is_told_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    running: Any = RunningRun()

    class Terminal(ImpatientTerminal):
        def flush(self) -> None:
            if "killing" not in self.getvalue():  # the third one would leave the run alone
                super().flush()

    def meanwhile() -> None:
        if not running.asked and not terminal.getvalue():
            signal.raise_signal(signal.SIGINT)

    has_result(monkeypatch, meanwhile)
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with pytest.raises(KeyboardInterrupt):
        collect_with_interrupts(running, running, Collector("stream"))
    assert running.asked == [{"type": "end-run", "run": 1, "kill": True}]
    assert "stopping run 1" in terminal.getvalue() and "killing run 1" in terminal.getvalue()


@pytest.mark.usefixtures("plain_signals")
def test_a_run_is_stopped_also_if_nobody_reads_that_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    running: Any = RunningRun()

    class Unread(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    has_result(monkeypatch, lambda: signal.raise_signal(signal.SIGINT) if len(running.asked) < 2 else None)
    monkeypatch.setattr("sys.stderr", Unread())
    with pytest.raises(KeyboardInterrupt):
        collect_with_interrupts(running, running, Collector("stream"))
    assert [request["kill"] for request in running.asked] == [False, True]


def test_a_run_is_stopped_also_if_nobody_reads_its_output() -> None:
    class Unread(RunningRun):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            raise BrokenPipeError

    running: Any = Unread()
    run = RunHandle(running, running, Collector("stream"), check=False)
    with pytest.raises(BrokenPipeError):
        run.result(30)
    assert run.cancel() and running.asked == [{"type": "end-run", "run": 1, "kill": False}]


@pytest.mark.usefixtures("plain_signals")
def test_ctrl_c_counts_also_if_the_kernel_gives_it_to_another_thread() -> None:
    class Interrupting(RunningRun):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            for _ in range(2):
                time.sleep(0.2)  # until the main thread waits; the test proves less if it does not
                signal.pthread_kill(threading.get_ident(), signal.SIGINT)
                until(lambda: self.asked, "the request to stop the run")
            yield from super().__iter__()

    running: Any = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        collect_with_interrupts(running, running, Collector("stream"))
    assert [request["kill"] for request in running.asked] == [False, True]


def test_the_repr_of_a_result_is_short() -> None:
    ranks = {
        rank: RankResult(rank, 0, 0, "<node>", 1, code, 2.0 * rank, code == 1, "", "trace\n" * 1000, "")
        for rank, code in enumerate((0, 1, -15))
    }
    failed = RunResult(3, 1, "rank 1: <b>", ranks, seconds=4.2, output={0: RankOutput("x" * 10_000)})
    assert repr(failed) == "<run 3 failed after 4.2 s, 3 ranks: rank 1: <b>>"
    assert len(repr(ranks)) < 1000
