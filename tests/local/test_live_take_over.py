# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A live allocation goes on when its leader is lost: its runs, its queue, and the clients that follow them."""

from __future__ import annotations

import json
import signal
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torchx.specs import AppDef

from tests.local.live import Live
from tests.local.place import LocalPlace
from torchx_monarch import serve
from torchx_monarch.client.result import RunResult
from torchx_monarch.exceptions import RefusedError

Eventually = Callable[..., object]

_OPTIONS = ("--grace", "5", "--preload", "", "--spares", "1", "--hands-over", "1")


@pytest.fixture
def program(folder: Path) -> Path:
    """A program whose ranks go on until there is a file ``go``."""
    path = folder / "prog.py"
    path.write_text(
        textwrap.dedent(f"""
            import os, sys, time
            names = ["TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE", "GROUP_RANK"]
            print("attempt", *(os.environ[name] for name in names), sys.argv[1:], flush=True)
            while not os.path.exists({str(folder / "go")!r}):
                time.sleep(0.05)
            print("done", os.environ["RANK"], flush=True)
        """)
    )
    return path


def allocation(folder: Path) -> Live:
    """Two hosts of one rank each, and a spare one."""
    return Live(folder, [], replicas=3, options=_OPTIONS).ready()


class Follower:
    """A run that a thread follows."""

    def __init__(self, hosts: Live, *words: str) -> None:
        self.lines: list[str] = []
        self.phases: list[str] = []
        self.result: RunResult | None = None
        self._hosts = hosts
        self._words = words
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.result = self._hosts.job.run_spmd(
            list(self._words),
            output=lambda rank, stream, text: self.lines.extend(text.splitlines()),
            on_phase=self.phases.append,
            check=False,
        )

    def count(self, text: str) -> int:
        return sum(text in line for line in self.lines)

    def join(self) -> RunResult:
        self._thread.join(120)
        assert self.result is not None, self.lines
        return self.result


def torchrun(program: Path, *words: str) -> list[str]:
    return ["torchrun", "--nnodes", "2", "--nproc-per-node", "1", str(program), *words]


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        pytest.param(
            signal.SIGTERM,
            marks=pytest.mark.nightly("8 s of processor time; a batch job's leader is preempted every time"),
        ),
    ],
)
def test_a_run_and_the_queue_go_on_under_the_next_host(
    folder: Path, program: Path, eventually: Eventually, number: signal.Signals
) -> None:
    hosts = allocation(folder)
    ended = hosts.run(*torchrun(Path("-m"), "this"))
    assert ended.exit_code == 0
    first = Follower(hosts, *torchrun(program, "first"))
    eventually(lambda: first.count("attempt 0") == 2, "the first attempt")
    eventually(lambda: "spare: host 2" in hosts.err(0), "the spare host")
    queued = hosts.job.run_spmd_async(torchrun(program, "second"), queue=True, output="store", check=False)
    hosts.processes[0].send_signal(number)
    eventually(lambda: first.count("attempt 1") == 2, "the attempt under host 1")
    assert first.count("attempt 0") == 2, "the client gets no line twice"
    assert any("goes on under host 1" in line for line in first.phases), first.phases
    assert sorted(line.split("attempt ")[1] for line in first.lines if "attempt 1" in line) == [
        "1 0 2 0 ['first']",
        "1 1 2 1 ['first']",
    ]
    assert [(one["run"], one["state"]) for one in hosts.job.runs()] == [(1, "succeeded"), (2, "running"), (3, "queued")]
    (folder / "go").touch()
    result = first.join()
    assert (result.exit_code, result.run, result.attempts) == (0, 2, 2), result
    assert first.count("done") == 2
    last = queued.result(60)
    assert last.exit_code == 0 and "attempt 0 0 2 0 ['second']\n" in last.output[0].stdout
    # The hosts tell of a run that has ended under the lost leader, and take new ones.
    assert hosts.job.follow(1, output="none").result(60).exit_code == 0
    with pytest.raises(RefusedError, match="run 9 is not known here; the last was 3"):
        hosts.job.follow(9)
    assert hosts.run(*torchrun(program, "third")).run == 4
    status = hosts.job.status()
    assert (status.ready, status.runs, sorted(status.hosts)) == (True, 4, [1, 2])
    assert hosts.end() == [-number if number == signal.SIGKILL else 128 + number, 0, 0]
    restarts = [event for event in hosts.events() if event["kind"] == "rank_restart"]
    assert len(restarts) == 1


@pytest.mark.nightly(
    "6 s of processor time; a run goes on in the same way, and a batch job's leader is preempted every time"
)
def test_an_idle_allocation_goes_on_when_its_leader_is_preempted(
    folder: Path, program: Path, eventually: Eventually
) -> None:
    hosts = allocation(folder)
    eventually(lambda: "spare: host 2" in hosts.err(0), "the spare host")
    hosts.processes[0].send_signal(signal.SIGTERM)
    assert hosts.processes[0].wait(60) == 128 + signal.SIGTERM
    eventually(lambda: hosts.job.status().ready and 0 not in hosts.job.status().hosts, "the hosts under host 1")
    (folder / "go").touch()
    result = hosts.run(*torchrun(program))
    assert (result.exit_code, result.run, result.attempts) == (0, 1, 1), result
    assert hosts.end() == [128 + signal.SIGTERM, 0, 0]
    assert not [event for event in hosts.events() if event["kind"] == "rank_restart"]


@pytest.mark.nightly(
    "8 s of processor time; tests/unit/test_session_record.py has what the next host does with the request"
)
def test_a_run_that_is_being_stopped_ends_under_the_next_host(
    folder: Path, program: Path, eventually: Eventually
) -> None:
    hosts = allocation(folder)
    eventually(lambda: "spare: host 2" in hosts.err(0), "the spare host")
    ignores = folder / "ignores.py"
    lines = "import signal, time", "signal.signal(signal.SIGTERM, signal.SIG_IGN)", "print('up', flush=True)"
    ignores.write_text("\n".join((*lines, "time.sleep(1000)")))
    run = Follower(hosts, *torchrun(ignores))
    eventually(lambda: run.count("up") == 2, "the ranks")
    hosts.job.cancel_run()
    hosts.processes[0].kill()
    result = run.join()
    assert (result.exit_code, result.reason) == (143, "run 1 was stopped by its client"), result
    assert hosts.end()[1:] == [0, 0]


@pytest.fixture
def place(leaves_nothing: None, tmp_path: Path) -> Iterator[LocalPlace]:
    made = LocalPlace(tmp_path)
    yield made
    made.close()


def test_the_runs_of_both_leaders_are_kept(place: LocalPlace, eventually: Eventually) -> None:
    path = place.program(f"""
        import os, time
        {place.hears.replace(chr(10), chr(10) + 8 * " ")}
        print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
        while not told("go"):
            time.sleep(0.05)
    """)
    role = place.torchrun(path, nproc=1, metadata={"monarch": {"spares": 1}})
    taken = serve(AppDef("live", [role]), place.name, dict(place.cfg), runner=place.runner)
    place.adopt(taken.handle)
    eventually(lambda: "spare: host 2" in place.log(taken.handle), "the spare host")
    assert taken.run_spmd(["-m", "this"], output="none").exit_code == 0
    lines: list[str] = []
    run = taken.run_spmd_async(output=lambda rank, stream, text: lines.append(text), check=False)
    eventually(lambda: "".join(lines).count("attempt 0") == 2, "the first attempt")
    place.lose(taken.handle, 0)
    eventually(lambda: "".join(lines).count("attempt 1") == 2, "the attempt under host 1")
    status = json.loads(place.torchx("monarch", "status", "--json", taken.handle))
    assert (status["state"], status["hosts"], status["ranks"]) == ("RUNNING", 2, 2)
    assert "ranks 0-1: main thread" in place.torchx("monarch", "stacks", taken.handle)
    place.tell("go")
    assert run.result(60).exit_code == 0
    place.torchx("cancel", taken.handle)
    place.wait(taken.handle)
    kept = json.loads(place.torchx("monarch", "ps", taken.handle, "--json"))
    assert [(one["run"], one["state"]) for one in kept] == [(1, "succeeded"), (2, "succeeded")]
    assert "Beautiful is better than ugly" in place.torchx("monarch", "follow", taken.handle, "1")
    assert place.torchx("monarch", "follow", taken.handle, "2").count("attempt 1") == 2
