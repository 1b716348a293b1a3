# SPDX-License-Identifier: BSD-3-Clause
"""What is known of a job, from its snapshot, its events and its log, and how it is shown, also in `ls`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
from torchx.specs import AppDef, Role

from torchx_monarch.backends.core.errors import BackendError, UserError
from torchx_monarch.backends.core.snapshot import AppSnapshot, Outcome, ReplicaSnapshot, RoleSnapshot
from torchx_monarch.backends.core.state import reduce
from torchx_monarch.cli import jobs, ls, main
from torchx_monarch.cli import status as status_command
from torchx_monarch.cli.explain import submitted_differences
from torchx_monarch.cli.status import facts, only_roles, render, show_when
from torchx_monarch.client.connection import Target
from torchx_monarch.exceptions import AllocationError, UnreachableError
from torchx_monarch.insight import events
from torchx_monarch.insight.rank_sample import NO_SAMPLES, RankSample, RankSamples
from torchx_monarch.insight.slowness import Kind, Slowness
from torchx_monarch.insight.timeline import Moment, last_slow
from torchx_monarch.insight.timeline import build as build_timeline
from torchx_monarch.model.host_result import HostResult
from torchx_monarch.model.role_spec import RoleSpec, WorkloadKind
from torchx_monarch.model.state import State
from torchx_monarch.schedulers.description import describe
from torchx_monarch.schedulers.job_status import JobStatus, LiveState, build, in_one_line, timeline_of

HANDLE = "monarch_local://torchx/train-x7"
NOW = 1000.0
TORCHRUN = ["--nnodes", "2", "--nproc-per-node", "4", "--max-restarts", "2", "train.py", "--lr", "0.1"]


def snapshot(*states: State, args: list[str] | None = None, entrypoint: str = "torchrun", **more: Any) -> AppSnapshot:
    """An app of one role, two replicas of which have these states."""
    replicas = [
        ReplicaSnapshot("train", index, state, started=0.0 if state is State.PENDING else 920.0)
        for index, state in enumerate(states or (State.RUNNING, State.RUNNING))
    ]
    role = Role("train", image="", entrypoint=entrypoint, args=TORCHRUN if args is None else args, num_replicas=2)
    spec = RoleSpec("train", len(replicas), workload=WorkloadKind.RANKS)
    return AppSnapshot("train-x7", "train", [RoleSnapshot(spec, replicas)], AppDef("train", [role]), 900.0, **more)


def status_of(app: AppSnapshot, happened: list[dict[str, Any]] | None = None, **more: Any) -> JobStatus:
    return build(HANDLE, replace(app, events=happened or []), reduce(app), now=NOW, **more)


def event(kind: str, message: str = "", time: float = 950.0, **fields: Any) -> dict[str, Any]:
    return {"time": time, "kind": kind, "message": message, **fields}


STARTED = [
    event("submitted", time=901.0),
    event("supervised", time=910.0),
    event("hosts", "hosts 2/2", count=2, role="train"),
    event("ranks", "ranks 8/8", count=8, role="train"),
]
BOOM = "rank 3 (...) exited with code 1: ValueError: boom"
RESTARTED = [
    *STARTED,
    event("failure", BOOM, 960.0),
    event("rank_restart", "restart 1 of 2 after: ...", 961.0, max_restarts=2, reason=BOOM),
]


def test_a_running_job() -> None:
    found = replace(status_of(snapshot(started=910.0), STARTED), last_output=997.0, log_folder="/logs", log="/logs")
    assert (found.state, found.phase, found.elapsed) == ("RUNNING", "running", 90.0)
    assert (found.attempt, found.attempts, found.hosts, found.ranks) == (1, 3, 2, 8)
    assert (found.submitted, found.started, found.ended, found.exit_code) == (900.0, 910.0, None, None)
    assert found.roles[0].command == "torchrun --nnodes 2 --nproc-per-node 4 --max-restarts 2 train.py --lr 0.1"
    assert render(found, NOW).splitlines() == [
        f"{HANDLE}: RUNNING for 1 min 30 s",
        "  phase        the program runs",
        "  attempt      1 of 3",
        "  replicas     train/0 RUNNING",
        "               train/1 RUNNING",
        "  hosts        2x4 (world size 8)",
        "  last output  3.0 s ago",
        "  logs         /logs",
        "  command      torchrun --nnodes 2 --nproc-per-node 4 --max-restarts 2 train.py --lr 0.1",
    ]


@pytest.mark.parametrize(("count", "phase"), [(0, None), (1, None), (2, "hosts"), (3, "ranks"), (4, "running")])
def test_the_phases_of_a_start(count: int, phase: str | None) -> None:
    assert status_of(snapshot(), STARTED[:count]).phase == phase


def test_an_elastic_job_on_fewer_hosts() -> None:
    app = snapshot(State.FAILED, State.RUNNING, State.RUNNING)
    assert status_of(app).hosts == 3
    fewer = [event("hosts", "hosts 2/3 (elastic, 1 to 3)", count=2), event("ranks", "ranks 8/8", count=8)]
    found = status_of(app, fewer)
    assert (found.hosts, found.ranks) == (2, 8) and "  hosts        2x4 (world size 8)" in render(found, NOW)


def test_a_role_without_hosts_waits_for_none() -> None:
    """Whether or not this machine sees its events; beside a role with hosts the phase is that of those."""
    app = snapshot(args=["-c", "sleep 30"], entrypoint="sh")
    plain = replace(app, roles=[replace(app.roles[0], spec=RoleSpec("train", 2))])
    begun = [*STARTED[:2], event("replica_started", time=911.0, role="train", replica=0)]
    assert [status_of(plain, happened).phase for happened in ([], begun)] == ["running", "running"]
    assert status_of(plain, [*begun, event("cancel", time=912.0)]).phase == "stopping"
    hosted = [*begun, event("hosts", count=2, time=912.0), event("ranks", attempt=0, time=913.0)]  # commands, no ranks
    assert (status_of(app, hosted).phase, status_of(app, hosted).attempt) == ("running", None)
    assert [status_of(snapshot(), happened).phase for happened in ([], begun)] == [None, "hosts"]
    beside = replace(app, roles=[*snapshot().roles, RoleSnapshot(RoleSpec("eval"), [])])
    assert status_of(beside, begun).phase == "hosts"


@pytest.mark.parametrize(
    ("restarts", "seen", "phases"),
    [
        (0, [], ["queued", "unknown"]),
        (0, [event("hosts", time=930.0), event("ranks", time=940.0)], ["queued", "hosts", "ranks", "running"]),
        # The events are those of its last start.
        (1, [event("job_started", time=930.0), event("hosts", time=940.0)], ["queued", "unknown", "hosts", "ranks"]),
    ],
)
def test_what_this_machine_does_not_see_is_unknown(
    restarts: int, seen: list[dict[str, Any]], phases: list[str]
) -> None:
    app = snapshot(events=seen)
    replicas = [replace(replica, restarts=restarts) for replica in app.replicas]
    app = replace(app, roles=[replace(app.roles[0], replicas=replicas)])
    timeline = timeline_of(app, reduce(app), NOW)
    assert [span.name for span in timeline.spans_of("phase")] == phases
    assert build(HANDLE, app, reduce(app), now=NOW).phase == (phases[-1] if seen else None)


def test_replicas_are_listed_and_many_that_are_alike_share_a_line() -> None:
    replicas = [ReplicaSnapshot("train", k, State.RUNNING, f"n{k}", restarts=int(k == 5)) for k in range(20)]
    replicas[3] = replace(replicas[3], state=State.FAILED, exit_code=-9)
    app = snapshot()
    roles = [RoleSnapshot(RoleSpec("train", 20), replicas), RoleSnapshot(RoleSpec("eval"), [replicas[0]])]
    roles[1] = replace(roles[1], replicas=[ReplicaSnapshot("eval", 0, State.PENDING)])
    app = replace(app, roles=roles)
    status = build(HANDLE, app, reduce(app), now=NOW)
    assert [text for title, text in facts(status, NOW) if title == "replicas"] == [
        "train/0-2,4,6-19 RUNNING",
        "train/3 FAILED with code 137 on n3",
        "train/5 RUNNING, 1 restart on n5",
        "eval/0 PENDING",
    ]
    job = jobs.JobFacts(app, status, build_timeline([], [], end=NOW))
    assert [text for title, text in facts(only_roles(job, ["eval"]), NOW) if title == "replicas"] == ["eval/0 PENDING"]
    assert only_roles(job, []) is status
    with pytest.raises(UserError, match=r"has no role 'evil'; its roles are train, eval"):
        only_roles(job, ["eval", "evil"])


def test_a_role_that_an_ended_job_does_not_have() -> None:
    scheduler = Mock()
    scheduler.apps.read.return_value = (app := snapshot(State.SUCCEEDED, State.SUCCEEDED)), reduce(app)
    with pytest.raises(UserError, match=r"has no role 'trian'; its roles are train"):
        jobs.JobReader(scheduler, HANDLE, "train-x7", "trian", "", 1.0).read()


def test_a_failure_and_a_restart() -> None:
    failed = status_of(snapshot(), RESTARTED[:-1])
    assert failed.phase == "stopping" and failed.last_failure is not None and failed.last_failure.time == 960.0
    again = status_of(snapshot(restarts=0), RESTARTED)
    assert (again.phase, again.attempt, again.attempts, again.restarts) == ("ranks", 2, 3, 1)
    assert again.last_failure is not None
    assert again.last_failure.message == "rank 3 (...) exited with code 1: ValueError: boom"
    assert "last failure 39.0 s ago: rank 3 (...)" in render(again, NOW)
    requeued = [*RESTARTED, event("requeue", time=962.0)]
    assert (status_of(snapshot(), requeued).attempt, status_of(snapshot(), requeued).attempts) == (None, 3)
    assert status_of(snapshot(), [*requeued, *({**later, "time": 963.0} for later in STARTED[2:])]).attempt == 1


REASON = "rank 1 (...) exited with code 1: ValueError: loss is nan"
FAILED = [event("failure", REASON, 960.0), event("result", f"FAILED: {REASON}", 961.0, code=1, reason=REASON)]
EXITED = [
    event("replica_exited", "replica train/1 (pid 8) exited with code 143", 962.0, exit_code=143, stopped=True),
    event("replica_exited", "replica train/0 (pid 7) exited with code 1", 962.0, exit_code=1, stopped=False),
]
AGAIN = event("restart", "the app is restarted (restart 1)", 963.0)


@pytest.mark.parametrize(
    ("happened", "time", "message"),
    [
        ([*FAILED, *EXITED, AGAIN], 960.0, REASON),
        ([*FAILED, *EXITED, AGAIN, *STARTED[2:]], 960.0, REASON),
        ([FAILED[1], *EXITED, AGAIN], 961.0, REASON),
        ([*EXITED, AGAIN], 962.0, "replica train/0 (pid 7) exited with code 1"),
        ([event("role_ended", "role a ended with code 0", exit_code=0), *FAILED, AGAIN], 960.0, REASON),
        (
            [event("preempted", "n2 is preempted"), event("requeue", "told to stop; queued", 964.0)],
            950.0,
            "n2 is preempted",
        ),
        (
            [event("failure", "host 1 is lost"), event("rank_restart", "host 2 takes the place of host 1")],
            950.0,
            "host 1 is lost",
        ),
        # The earlier failure has been answered, and is not the reason of this restart.
        (
            [*FAILED, AGAIN, event("ranks", time=965.0), event("requeue", "told to stop; queued", 970.0)],
            970.0,
            "told to stop; queued",
        ),
    ],
)
def test_a_restart_is_shown_with_the_failure_before_it(
    happened: list[dict[str, Any]], time: float, message: str
) -> None:
    found = status_of(snapshot(restarts=1), [*STARTED, *happened]).last_failure
    assert found is not None and (found.time, found.message) == (time, message)


def test_spare_and_excluded_hosts() -> None:
    told = event("excluded", "n2 is excluded after 3 failures within 1 h, the last: rank 8 exited", host="n2")
    spares = event("spares", "spare: host 2 (n3, pid 7), ...", role="train", hosts=["n3", "n4"])
    memory = event("checkpoint_memory", "...", role="train", bytes=3 << 29)
    shown = render(status_of(snapshot(), [*STARTED, spares, memory, told]), NOW)
    assert "  checkpoints  1.50 GiB of the memory of each host\n" in shown
    assert "  spares       n3, n4\n" in shown and "\n  excluded     n2 is excluded after 3" in shown


def test_a_checkpoint_that_was_not_copied_is_shown_until_one_is() -> None:
    text = "the checkpoint of step 8 is not in /data: No space left on device"
    happened = [*STARTED, event("persist_failed", text, 990.0, role="train")]
    found = status_of(snapshot(), happened)
    assert f"  persist      10.0 s ago: {text}\n" in render(found, NOW)
    assert found.persist_failure is not None and found.to_json()["persist_failure"]["message"] == text
    ended = status_of(snapshot(State.SUCCEEDED, State.SUCCEEDED), happened)
    assert ended.cause.endswith(text) and render(ended, NOW).count(text) == 1
    assert status_of(snapshot(), [*happened, event("checkpoint", time=995.0, role="train")]).persist_failure is None


def test_an_ended_job() -> None:
    done = snapshot(State.SUCCEEDED, State.SUCCEEDED, started=910.0)
    ended = [replace(replica, ended=980.0) for replica in done.replicas]
    found = status_of(replace(done, roles=[replace(done.roles[0], replicas=ended)]), STARTED)
    assert (found.state, found.exit_code, found.ended, found.elapsed, found.phase) == ("SUCCEEDED", 0, 980, 70, None)
    error = HostResult(-9, "rank 1 was killed", failed_at=970.0).to_text()
    failed = [replace(replica, state=State.FAILED, error=error, ended=980.0) for replica in done.replicas]
    found = status_of(replace(done, roles=[replace(done.roles[0], replicas=failed)]), STARTED)
    assert (found.state, found.exit_code, found.has_ended) == ("FAILED", 137, True)
    assert "exit code    137" in render(found, NOW)
    plain = [replace(replica, state=State.FAILED, exit_code=3, ended=980.0) for replica in done.replicas]
    assert status_of(replace(done, roles=[replace(done.roles[0], replicas=plain)])).exit_code == 3


def test_an_ended_job_says_what_the_last_screen_of_its_run_says(tmp_path: Path) -> None:
    (log := tmp_path / "stderr.log").touch()
    traceback = 'Traceback:\n  File "/w/train.py", line 4, in step\n'
    error = HostResult(1, REASON, traceback, 960.0, replica=0, log=str(log)).to_text()
    whole = f"replica train/0 (pid 7) exited with code 1: {REASON}"
    app = snapshot(State.SUCCEEDED, State.SUCCEEDED)
    failed = replace(app.replicas[0], state=State.FAILED, failure=whole, error=error, exit_code=1, ended=980.0)
    app = replace(app, roles=[replace(app.roles[0], replicas=[failed, app.replicas[1]])])
    status = status_of(app, [*STARTED, *FAILED])
    shown = render(status, NOW)
    assert shown.count(REASON) == 1 and "replica train/0" not in shown and "last failure" not in shown
    lines = shown.splitlines()
    assert lines[1:4] == [
        f"  cause        {REASON}",
        "  raised       /w/train.py, line 4, in step",
        f"  log          {log}",
    ]
    assert lines[-2:] == [
        f"  next         torchx log {HANDLE}/train/0",
        f"               torchx monarch report {HANDLE} -o job.html",
    ]
    screen = status.summary().lines()
    same = [line.split(maxsplit=1)[1] for line in (*lines[1:4], *lines[-2:])]
    assert [line.split(maxsplit=1)[1] for line in (*screen[1:4], *screen[-2:])] == same
    assert screen[4] == "  ran:    2 hosts x 4 ranks, no restart" and len(screen) == 7


def test_a_restarted_job_started_when_it_first_did() -> None:
    """Replicas tell their latest start. ``ls`` has no events, and ``status`` does."""
    app = snapshot(started=905.0, restarts=1)
    assert [status_of(app, happened).started for happened in ([], RESTARTED)] == [905.0, 905.0]
    assert [status_of(replace(app, started=0.0), happened).started for happened in ([], RESTARTED)] == [920.0, 920.0]


def test_facts_that_nobody_knows_are_none() -> None:
    bare = AppSnapshot("x", "x", [], app=None, native=None)
    found = build(HANDLE, bare, reduce(bare), now=NOW)
    for name in ("submitted", "started", "ended", "elapsed", "exit_code", "attempt", "attempts", "hosts", "ranks"):
        assert getattr(found, name) is None, name
    assert render(found, NOW).splitlines() == [f"{HANDLE}: PENDING", "  phase        waits to start"]


def test_fields_of_a_wrong_type_are_ignored(tmp_path: Path) -> None:
    digits = "9" * 5000  # int() raises ValueError above 4,300
    written = [
        event("hosts", count=digits),
        event("ranks", count=[1]),
        event("spares", hosts=7),
        event("checkpoint_memory", bytes="much"),
        event("hang", reason=1),
    ]
    (path := tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in written))
    found = status_of(snapshot(), events.read(path)[0])
    assert (found.hosts, found.ranks, found.attempts) == (2, 8, 3)
    assert status_of(snapshot(args=["--nproc-per-node", digits, "train.py"])).ranks is None


def test_a_live_allocation() -> None:
    run = {"run": 3, "state": "failed", "exit_code": 1, "started": 940.0, "ended": 950.0, "command": "torchrun\nt.py"}
    live = LiveState(True, 2, None, 3, 0, 42.0, 600.0, (run,))
    app = snapshot(args=["-m", "torchx_monarch.hosts"], entrypoint="python")
    allocation = RoleSpec("train", 2, workload=WorkloadKind.ALLOCATION)
    app = replace(app, roles=[replace(app.roles[0], spec=allocation)])
    found = status_of(app, STARTED[:3], live=live)
    assert (found.phase, found.attempt) == ("ready", None)
    shown = render(found, NOW)
    assert "  phase        ready for clients\n" in shown
    assert "  runs         3 so far\n" in shown and "  idle         42.0 s of 10 min 0 s" in shown
    assert "               run 3 failed with code 1 after 10.0 s: torchrun t.py\n" in shown
    assert "idle" not in render(replace(found, live=replace(live, run=4)), NOW)
    begun = [*STARTED[:3], event("run", "run 4: t.py", 960.0, run=4), event("ranks", time=961.0, count=8)]
    assert (status_of(app, begun).phase, status_of(app, begun).attempt) == ("running", 1)


def test_names_and_messages_are_escaped() -> None:
    app = snapshot(args=["--role", "x\x1b]0;", "train.py\n"])
    found = status_of(app, [event("failure", "rank 1 said \x1b[2Jboom\nnext")])
    assert "\x1b" not in render(found, NOW) and "\\x1b[2Jboom\\nnext" in render(found, NOW)
    json.dumps(found.to_json())


def test_torchx_shows_one_line_of_it() -> None:
    app = snapshot(restarts=1)
    again = event("ranks", "ranks 8/8", 962.0, count=8, role="train")
    line = in_one_line(status_of(app, [*RESTARTED, again]), NOW)
    assert line == (
        "the program runs; attempt 2 of 3; 8 ranks on 2 hosts; "
        "last failure 39 s ago: rank 3 (...) exited with code 1: ValueError: boom"
    )
    assert (
        describe(replace(app, events=STARTED), reduce(app)).msg
        == "the program runs; attempt 1 of 3; 8 ranks on 2 hosts"
    )
    waiting = replace(snapshot(State.PENDING, State.PENDING), notes=["the queue is full"])
    assert describe(waiting, reduce(waiting)).msg == "the queue is full"


def test_ranks_that_hang_are_shown_until_they_go_on() -> None:
    text = "rank 3 has not called gloo:all_reduce, number 6 of group 0, in which ranks 0-2 have waited for 300 s"
    hanging = [*STARTED, event("hang", f"hang: {text}", 990.0, reason=text)]
    status = status_of(snapshot(), hanging)
    assert (
        status.phase == "hang" and status.hang is not None and (status.hang.time, status.hang.message) == (990.0, text)
    )
    assert f"  hang         10.0 s ago: {text}" in render(status, NOW).splitlines()
    assert f"hang: {text}" in in_one_line(status, NOW)
    stopped = [
        *hanging,
        event("stop", "host 0 was told to stop", 991.0),
        event("result", "STOPPED: host 0 was told to stop", 992.0, stopped=True),
    ]
    cancelled = snapshot(native=Outcome(State.CANCELLED, "cancelled"), events=stopped)
    ended = render(status_of(cancelled, stopped), NOW)  # which somebody may read days later
    assert f"  hang         {show_when(990.0, None)}: {text}" in ended.splitlines() and " ago" not in ended
    assert describe(cancelled, reduce(cancelled)).msg == f"cancelled; hang: {text}"
    shown = status_of(cancelled, stopped).summary().lines()
    assert f"  cause:  cancelled; hang: {text}" in shown
    done = replace(cancelled, native=Outcome(State.SUCCEEDED))
    assert status_of(done, [*hanging, event("result", "SUCCEEDED: all ranks", 991.0)]).hang is None
    for kind in ("hang_end", "failure", "rank_restart", "ranks"):
        assert status_of(snapshot(), [*hanging, event(kind, time=991.0)]).hang is None


def test_a_watched_status_does_not_scroll(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    running, ended = status_of(snapshot(State.RUNNING)), status_of(snapshot(State.SUCCEEDED))
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: os.terminal_size((80, 3)))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    status_command.watch(iter([running] * 3 + [ended]), as_json=False)
    frames = re.split(r"\x1b\[(\d+)A\x1b\[J", capsys.readouterr().out)
    assert frames[1::2] == ["2"] * 3 and [frame.count("\n") for frame in frames[:-1:2]] == [2] * 3
    assert frames[-1] == render(ended) + "\n"


def test_what_slows_the_ranks_is_shown_until_it_is_gone() -> None:
    found = Slowness(Kind.INPUT, (5,), "node7", 1, False, 0.38, 0.275, 880.0, 4100, "/home/me/data.py:41")
    slow = [*STARTED, event("slow", "slow since …", 990.0, slowness=json.loads(json.dumps(asdict(found))))]
    status = status_of(snapshot(), slow)
    line = "step 4,100: rank 5 (node7), 38 % behind the others, in its input: data.py:41; 33.0 s lost so far"
    assert f"  slow         since {line}" in render(status, NOW).splitlines()
    assert f"slow since {line}" in in_one_line(status, NOW)
    assert json.loads(json.dumps(status.to_json()))["slow"]["kind"] == "input" and last_slow(slow) == "slow since …"
    for kind in ("slow_end", "failure", "rank_restart", "ranks"):
        assert status_of(snapshot(), [*slow, event(kind, time=991.0)]).slow is None
    for wrong in ({}, {**asdict(found), "since": 1e300}, {**asdict(found), "kind": "other"}, None):
        assert status_of(snapshot(), [*STARTED, event("slow", "slow", 990.0, slowness=wrong)]).slow is None
    assert last_slow([*slow, event("slow_end", time=991.0)]) is None


def test_a_watched_status_shows_the_whole_place_of_a_hang(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = "/a/folder/of/programs/train.py:5 in <module>"
    hang = Moment(
        NOW, "hang", f"rank 1 has not called gloo:all_reduce, number 1 of group 0; rank 1 (host 0): is at {place}"
    )
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: os.terminal_size((80, 24)))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    status_command.watch(iter([replace(status_of(snapshot()), hang=hang)]), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and place in " ".join(line.strip() for line in lines)


def job(handle: str, name: str, **more: object) -> JobStatus:
    return JobStatus(handle, name, "RUNNING", **more)  # type: ignore[arg-type]


def table(capsys: pytest.CaptureFixture[str], *jobs: JobStatus) -> list[list[str]]:
    ls._print(jobs)
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_ids_tell_two_runs_of_one_name_apart(capsys: pytest.CaptureFixture[str]) -> None:
    handles = ("monarch_local://torchx/train-x7", "monarch_local://torchx/train-b9")
    head, *rows = table(capsys, *(job(handle, "train", hosts=2, ranks=8, exit_code=3) for handle in handles))
    assert head == ["ID", "STATE", "AGE", "TIME", "CODE", "HOSTS"]
    assert rows == [["train-x7", "RUNNING", "3", "2x4"], ["train-b9", "RUNNING", "3", "2x4"]]


def test_names_and_schedulers_are_shown_where_they_differ(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = job("monarch_slurm://torchx/47", "train"), job("monarch_local://torchx/eval-x", "eval", hosts=2, ranks=3)
    head, *rows = table(capsys, *jobs)
    assert head == ["ID", "NAME", "STATE", "AGE", "TIME", "CODE", "HOSTS", "SCHEDULER"]
    assert rows[0] == ["47", "train", "RUNNING", "monarch_slurm"]
    assert rows[1] == ["eval-x", "eval", "RUNNING", "2", "with", "3", "ranks", "monarch_local"]


def test_a_table_fits_the_terminal_and_has_the_newest_jobs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [job(f"monarch_slurm://torchx/{at}", "n" * 300, submitted=NOW - at, hosts=2, ranks=8) for at in range(60)]
    jobs.append(job(f"monarch_local://torchx/{'i' * 300}", "n" * 300, submitted=NOW + 1))
    monkeypatch.setattr(ls, "_jobs", lambda name, local: jobs)
    monkeypatch.setattr(ls, "is_terminal", lambda stream: True)
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: os.terminal_size((100, 24)))
    parser = argparse.ArgumentParser()
    main.add_arguments("ls", parser)
    ls.run(parser.parse_args(["-s", "monarch_slurm"]))
    said = capsys.readouterr()
    head, first, *rest = said.out.splitlines()
    assert len(rest) == 49 and max(map(len, [head, first, *rest])) <= 100
    assert first.startswith("iii") and "i…  nnnnnnnnnnn…  RUNNING" in first
    assert said.err == "[monarch] 11 older jobs are not shown; --limit 0 lists all\n"
    ls.run(parser.parse_args(["-s", "monarch_slurm", "--limit", "0"]))
    assert len(capsys.readouterr().out.splitlines()) == 62
    ls.run(parser.parse_args(["-s", "monarch_slurm", "--json"]))
    assert len(json.loads(capsys.readouterr().out)) == 61


def test_names_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    ls._print([job("monarch_slurm://torchx/47", "a\x1b[31m\nb")])
    assert "a\\x1b[31m\\nb" in capsys.readouterr().out


def test_ranks_that_wait_in_a_breakpoint_are_named_until_they_go_on() -> None:
    text = "rank 1 waits at train.py:3 in f for 300 s. Debug it: torchx monarch debug H --rank 1"
    told = event("breakpoint", text, NOW - 2, rank=1)
    running = status_of(snapshot(), [*STARTED, told])
    assert f"  breakpoint   2.0 s ago: {text}" in render(running, NOW) and text in in_one_line(running, NOW)
    gone = event("breakpoint_end", "rank 1 goes on without a debugger", NOW - 1, rank=1)
    assert not status_of(snapshot(), [*STARTED, told, gone]).breakpoints
    app = snapshot()
    both = [replace(app.roles[0], spec=replace(app.roles[0].spec, name=name)) for name in "ab"]
    waiting = [{**told, "role": "a"}, {**told, "role": "b", "message": "rank 1 of b"}]
    for end in ({**gone, "role": "a"}, event("ranks", time=NOW - 1, role="a")):
        found = status_of(replace(app, roles=both), [*STARTED, *waiting, end])
        assert [place.message for place in found.breakpoints] == ["rank 1 of b"]


@pytest.mark.parametrize(("phase", "asked"), [("queued", 0), ("hosts", 1), ("running", 1)])
def test_the_ranks_of_one_role_are_asked_while_another_one_starts(
    phase: str, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_samples, scheduler = Mock(return_value=(NO_SAMPLES, {})), Mock()
    scheduler.apps.replica_log.return_value = []
    monkeypatch.setattr(jobs, "ask_samples", ask_samples)
    status = replace(status_of(snapshot()), phase=phase)
    reader = jobs.JobReader(scheduler, HANDLE, "train-x7", "trainer", "", 1.0)
    reader._with_ranks(jobs.JobFacts(snapshot(), status, build_timeline([], [], end=NOW)), 0.0)
    assert ask_samples.call_count == asked


@pytest.mark.parametrize("error", [UnreachableError("broken"), AllocationError("it runs another job")], ids=str)
def test_hosts_that_have_another_run_are_not_silent(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "ask_samples", Mock(side_effect=error))
    app = snapshot(last_sign_of_life=time.time() - 100)
    reader = jobs.JobReader(Mock(), HANDLE, "train-x7", "train", "", 1.0, hosts=Mock(handle=HANDLE))
    facts = reader._with_ranks(jobs.JobFacts(app, status_of(app), build_timeline([], [], end=NOW)), 0.0)
    assert facts.problem == str(error) and (facts.status.silent is not None) == isinstance(error, UnreachableError)


@pytest.mark.parametrize("watch", [False, True])
def test_the_status_says_if_nothing_answers_at_the_address_of_the_user(
    watch: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = jobs.JobFacts(snapshot(), status_of(snapshot()), build_timeline([], [], end=NOW), problem="refused")
    ended = replace(found, status=replace(found.status, state="SUCCEEDED"), problem="")
    reader = jobs.JobReader(Mock(**{"inner.poll": 0.0}), HANDLE, "train-x7", "", "localhost:9000", 1.0)
    monkeypatch.setattr(reader, "read", Mock(side_effect=[found, ended]))
    monkeypatch.setattr(status_command, "opened_job", lambda *_, **__: contextlib.nullcontext(reader))
    words = {"handle": HANDLE, "address": reader.address, "roles": "", "json": False}
    status_command.run(argparse.Namespace(watch=watch, **words))
    shown = capsys.readouterr()
    assert shown.err == "[monarch] refused\n"
    assert shown.out.count(HANDLE) == 1 + watch  # what was read first is shown, too


@pytest.mark.parametrize("error", [UnreachableError("no"), BackendError("no")], ids=["host", "scheduler"])
def test_the_hosts_of_an_allocation_are_asked_at_the_address_of_the_user(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_handle = Mock(side_effect=error)
    monkeypatch.setattr(Target, "from_handle", from_handle)
    role = RoleSnapshot(RoleSpec("train", 2, workload=WorkloadKind.ALLOCATION), [])
    app = replace(snapshot(), roles=[role])
    reader = jobs.JobReader(Mock(), HANDLE, "train-x7", "", "localhost:9000", 1.0)
    assert reader._ask_live(app) is None and reader._ask_events(app) == []
    assert from_handle.call_args_list == [call(HANDLE, "train", "localhost:9000")] * 2


def test_rates_stay_while_replica_0_answers_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (
        RankSamples(
            (RankSample(0, 0, "node0", 9, "running", time=at, local_rank=0, attempt=0, started=1.0, cpu_seconds=at),)
        )
        for at in (98.0, 100.0)
    )
    monkeypatch.setattr(jobs, "ask_samples", Mock(side_effect=[(first, {}), (second, {}), (second, {})]))
    reader = jobs.JobReader(Mock(), HANDLE, "train-x7", "trainer", "", 1.0)
    assert [reader._ask_ranks(Mock(), 0.0)[0][0].cpu for _ in range(3)] == [None, 1.0, 1.0]


def test_the_only_roles_of_two_jobs_are_compared_though_their_scripts_have_other_names() -> None:
    roles = (Role(name, "/image", args=[f"{name}.py"]) for name in ("train", "train_2"))
    one, other = (AppSnapshot("x", "x", [], AppDef("x", [role])) for role in roles)
    assert [*submitted_differences(one, other)] == [("train", "command", "<MISSING> train.py", "<MISSING> train_2.py")]
