# SPDX-License-Identifier: BSD-3-Clause
"""The last screen of a command that waits, what TorchX prints before, and the command for the end of a job."""

from __future__ import annotations

import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from torchx.specs import AppDef, Role
from torchx.specs import AppStatus as TorchXStatus

from torchx_monarch.backends.core.snapshot import AppSnapshot, ReplicaSnapshot, RoleSnapshot
from torchx_monarch.backends.core.state import reduce
from torchx_monarch.cli import exec as exec_command
from torchx_monarch.client.result import RankResult, RunResult
from torchx_monarch.insight import job_end
from torchx_monarch.insight.events import Event
from torchx_monarch.insight.job_end import JobEnd
from torchx_monarch.insight.summary import Summary, show_duration
from torchx_monarch.model.host_result import HostResult
from torchx_monarch.model.role_spec import RoleSpec, WorkloadKind
from torchx_monarch.model.state import State
from torchx_monarch.schedulers.description import describe, shorten
from torchx_monarch.schedulers.job_status import build

HANDLE = "monarch_local://torchx/train-x1y2z3"
TRACEBACK = (
    'Traceback:\n  File "/w/train.py", line 9, in <module>\n    f()\n  File "/w/train.py", line 4, in f\n    x\n'
)
REASON = "rank 1 (local rank 1 on node7, pid 4711) exited with code 1: ValueError: boom"


def app(state: State, *, error: str = "", ui_url: str = "", nproc: str = "4") -> AppSnapshot:
    failure = "replica train/1 exited with code 1" if state is State.FAILED else ""
    replicas = [
        ReplicaSnapshot("train", 0, State.SUCCEEDED, started=100, ended=104),
        ReplicaSnapshot("train", 1, state, started=100, ended=104, failure=failure, error=error, rank_restarts=2),
    ]
    spec = RoleSpec("train", 2, workload=WorkloadKind.RANKS)
    words = ["--nnodes", "2", "--nproc-per-node", nproc, "train.py"]
    role = Role("train", image="", entrypoint="torchrun", args=words, num_replicas=2)
    return AppSnapshot("train-x1y2z3", "train", [RoleSnapshot(spec, replicas)], AppDef("train", [role]), ui_url=ui_url)


def lines_of(snapshot: AppSnapshot) -> list[str]:
    return build(HANDLE, snapshot, reduce(snapshot), now=200.0).summary().lines()


@pytest.mark.parametrize(("seconds", "hints"), [(1.9, 0), (2.5, 1)])
def test_ranks_that_took_long_to_their_group_are_a_hint(seconds: float, hints: int) -> None:
    exits = [{"rank": rank, "code": 0, "started": 100, "ended": 104, "grouped": 100 + seconds} for rank in (0, 1)]
    ended: Event = {"time": 104, "kind": "attempt_end", "message": "", "exits": exits}
    met: Event = {"time": 98, "kind": "hosts", "message": ""}
    started: Event = {"time": 99, "kind": "ranks", "message": "", "hosts": [{"replica": 0, "pids": [1, 2]}]}
    shown = lines_of(replace(app(State.SUCCEEDED), events=[met, started, ended]))
    assert len([line for line in shown if line.startswith("  hint:   ranks took 2.5 s or more until")]) == hints
    why = "train.py:7 import wandb: it runs a thread (x)"
    started["unshared"] = why
    shown = lines_of(replace(app(State.SUCCEEDED), events=[met, started, ended]))
    assert sum(line.endswith(f"formed; the first statement that they do not share: {why}") for line in shown) == hints


def frames(*paths: str) -> str:
    return "Traceback:\n" + "".join(f'  File "{path}", line {n}, in f{n}\n    f()\n' for n, path in enumerate(paths, 1))


PACKAGES = "/w/.venv/lib/python3.11/site-packages"
LINEAR = f"{PACKAGES}/torch/nn/modules/linear.py"


@pytest.mark.parametrize(
    ("paths", "shown"),
    [
        (("/w/train.py", f"{PACKAGES}/torch/nn/modules/module.py", LINEAR), (1, 3)),
        (("/w/train.py", LINEAR, "/w/model.py", "/usr/lib/python3.11/pathlib.py"), (3, 4)),
        (("/w/train.py", "/usr/lib/python3/dist-packages/x.py", "<frozen importlib._bootstrap>"), (1, 3)),
        ((LINEAR, "/w/hook.py"), (2,)),
        ((LINEAR, f"{PACKAGES}/mine/train.py"), (2,)),  # an installed program
    ],
)
def test_a_library_is_named_behind_the_line_that_called_it(paths: tuple[str, ...], shown: tuple[int, ...]) -> None:
    at = [f"{paths[n - 1]}, line {n}, in f{n}" for n in shown]
    at[1:] = [re.sub(r"^.*(?:-packages|python3.11)/", "", text) for text in at[1:]]
    lines = Summary("FAILED", HANDLE, traceback=frames(*paths)).lines()
    assert lines[1:] == [f"  raised: {', which called '.join(at)}"]


def test_where_a_task_of_a_group_failed() -> None:
    """As Python shows the exceptions of an ``asyncio.TaskGroup``."""
    trace = '  + Exception Group Traceback\n  |   File "/w/a.py", line 8, in <module>\n  |     run()\n'
    trace += '  +-+------ 1 ------\n    |   File "/w/a.py", line 4, in work\n    | ValueError: x\n'
    assert Summary("FAILED", HANDLE, traceback=trace).lines()[1:] == ["  raised: /w/a.py, line 4, in work"]


def test_what_is_not_known_is_left_out() -> None:
    assert lines_of(app(State.FAILED)) == [
        f"FAILED after 4.0 s: {HANDLE}",
        "  cause:  replica train/1 exited with code 1",
        "  ran:    2 hosts x 4 ranks, 2 restarts",
        f"  next:   torchx log {HANDLE}/train/1",
        f"          torchx monarch report {HANDLE} -o job.html",
    ]
    elsewhere = HostResult(1, REASON, log="/nowhere/on/this/machine/stderr.log", replica=7)
    shown = lines_of(app(State.FAILED, error=elsewhere.to_text(), nproc="gpu"))
    assert not any("log: " in line or "raised" in line for line in shown)
    assert "  ran:    2 hosts, 2 restarts" in shown
    assert shown[-2].endswith("/train/1")


def test_the_screen_has_twelve_lines_whatever_a_rank_writes() -> None:
    hostile = Summary(
        "FAILED",
        HANDLE,
        7300.0,
        cause="rank 1 \x1b[2J\r" + "word " * 2000 + "x" * 5000,
        traceback='  File "/w/\x1b[31mtrain.py", line 4, in f',
        log="/a/path/of/eighty/columns/" + "y" * 50,
        ran="2 hosts x 4 ranks, 2 restarts",
        next=(f"torchx log {HANDLE}", f"torchx delete {HANDLE}"),
    )
    shown = hostile.lines(width=80)
    assert sum(-(-len(line) // 80) for line in shown) <= 12
    assert shown[0] == f"FAILED after 2 h 1 min: {HANDLE}"
    assert "\x1b" not in "".join(shown) and "\r" not in "".join(shown)
    assert all(len(line) < 600 for line in hostile.lines())


def test_colours_are_for_terminals_alone() -> None:
    assert Summary("FAILED", HANDLE).lines(coloured=True)[0].startswith("\x1b[31mFAILED\x1b[0m")
    stream = io.StringIO()
    Summary("FAILED", HANDLE, cause="x" * 200).write(stream)
    assert stream.getvalue() == f"FAILED: {HANDLE}\n  cause:  {'x' * 200}\n"
    Summary("FAILED", HANDLE).write(None)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(-1, "0.0 s"), (59.94, "59.9 s"), (61.2, "1 min 1 s"), (3599.6, "1 h 0 min")]
)
def test_durations(seconds: float, shown: str) -> None:
    assert show_duration(seconds) == shown


def test_what_torchx_prints_is_short_and_without_json() -> None:
    failed = app(State.FAILED, error=HostResult(1, REASON + " x" * 500, TRACEBACK, replica=1).to_text())
    status = reduce(failed)
    said = shorten(describe(failed, status), status)
    shown = str(TorchXStatus(said.state, 0, said.msg, said.structured_error_msg, said.ui_url, said.roles_statuses))
    assert len(shown.splitlines()) == 7
    assert "rank 1 (local rank 1 on node7" in shown and "python/object" not in shown and "{" not in shown


def rank_result(rank: int, replica: int) -> RankResult:
    return RankResult(rank, 0, replica, f"node{replica}", 1, 1, 1.0, True, "", TRACEBACK, "/nowhere/stderr.log")


def test_a_run_on_an_allocation_ends_with_the_same_lines() -> None:
    ranks = {rank: rank_result(rank, rank // 2) for rank in range(4)}
    failed = RunResult(3, 1, REASON, ranks, attempts=2, seconds=4.0, cause=2)
    assert exec_command.summary_of(HANDLE, failed).lines() == [
        f"FAILED after 4.0 s: run 3 on {HANDLE}",
        f"  cause:  {REASON}",
        "  raised: /w/train.py, line 4, in f",
        "  log:    /nowhere/stderr.log on node1",
        "  ran:    2 hosts x 2 ranks, 1 restart",
        f"  next:   torchx monarch follow {HANDLE} 3",
    ]
    assert exec_command.summary_of(HANDLE, RunResult(4, 0, "all 4 ranks ended", ranks, seconds=4.0)).lines() == [
        f"SUCCEEDED after 4.0 s: run 4 on {HANDLE}",
        "  ran:    2 hosts x 2 ranks, no restart",
        f"  next:   torchx monarch stop {HANDLE}",
    ]
    assert exec_command.summary_of(HANDLE, RunResult(5, 143, "stopped", stopped=True)).lines()[0].startswith("STOPPED")


_END = JobEnd("app-x", "app", State.FAILED, 'it said "no"\n', 3, 1.0, 2.0, 0)


def test_the_command_gets_the_end_as_json(tmp_path: Path) -> None:
    assert _END.run(f"cat > {tmp_path}/end", os.environ) == ""
    got = json.loads((tmp_path / "end").read_text())
    assert (got["id"], got["state"], got["exit_code"], got["message"]) == ("app-x", "FAILED", 3, 'it said "no"\n')


def test_what_fails_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    said = _END.run("echo first >&2; printf 'la\\033[2Jst' >&2; exit 5", os.environ)
    assert said == "the command of -cfg on_end has failed: it exited with code 5: la\\x1b[2Jst"
    assert _END.run("kill -9 $$", os.environ).endswith("failed: it was killed by signal 9 (SIGKILL)")
    assert _END.run("exec sleep 1000 & exit 0", os.environ) == ""  # which does not outlive the command
    monkeypatch.setattr(job_end, "_TIMEOUT", 0.01)
    assert _END.run("sleep 1000", os.environ).endswith("it has not ended within 0.01 s, and was killed")
