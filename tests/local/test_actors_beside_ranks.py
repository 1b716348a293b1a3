# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The hosts of ranks as a Monarch host mesh: clients attach, spawn actors, and detach or die; the ranks go on."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torchx.runner import Runner, get_runner
from torchx.specs import AppState

from tests.local.live import Live
from tests.waits import WITHIN, until
from torchx_monarch.client.allocation import Allocation

Eventually = Callable[..., object]

EXAMPLE = Path(__file__).parents[2] / "examples" / "actors_beside_ranks.py"

STEPS = """
import os, sys, time
print("rank", os.environ["RANK"], "steps", flush=True)
while not os.path.exists({go!r}):
    time.sleep(0.01)
sys.exit(int(os.environ.get("CODE", "0")))
"""

CLIENT = """
import json, os, sys
from monarch.actor import Actor, endpoint
from torchx_monarch import SPMDJob

class Where(Actor):
    @endpoint
    def am_i(self):
        print("an actor is here", flush=True)
        return os.getpid(), os.environ.get("RANK"), os.environ.get("WHO"), os.environ.get("MONARCH_CREDENTIALS")

job = SPMDJob.attach({handle!r}{where})
state = job.state(cached_path=None)
actors = state.workers.spawn_procs().spawn("where", Where)
found = [answer for _, answer in actors.am_i.call().get(timeout=240)]
print(json.dumps(found), flush=True)
{then}
"""
"""A Monarch client of a job's hosts, which prints what an actor on each of them sees."""


@pytest.fixture
def runner() -> Iterator[Runner]:
    with get_runner() as runner:
        yield runner
        for app in runner.list("monarch_local"):
            runner.cancel(app.app_handle)
            runner.wait(app.app_handle, wait_interval=0.1)


@contextlib.contextmanager
def client(folder: Path, handle: str, then: str, where: str = "") -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """Run ``CLIENT`` in a process of its own; yield it, and what it has printed. It is killed at the end."""
    (folder / "client.py").write_text(CLIENT.format(handle=handle, then=then, where=where))
    with open(folder / "client.err", "w") as errors:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        process = subprocess.Popen([sys.executable, "client.py"], cwd=folder, text=True, **pipes)  # type: ignore[call-overload]
    assert process.stdin is not None and process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, (folder / "client.err").read_text()
        yield process, json.loads(line)
    finally:
        process.kill()
        process.wait(WITHIN)
        process.stdin.close()
        process.stdout.close()


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    return False


def submit(runner: Runner, tmp_path: Path, shape: str, env: str) -> str:
    (tmp_path / "steps.py").write_text(STEPS.format(go=str(tmp_path / "go")))
    words = ["-j", shape, "--env", env, str(tmp_path / "steps.py")]
    cfg = {"preload": "none", "grace": 5}
    handle: str = runner.run_component("monarch.spmd", words, "monarch_local", cfg=cfg)
    return handle


@pytest.mark.parametrize("then", ["sys.stdin.read()", "state.workers.shutdown().get(timeout=60); sys.stdin.read()"])
def test_a_client_of_a_batch_job_spawns_actors_and_dies(
    tmp_path: Path, runner: Runner, eventually: Eventually, then: str
) -> None:
    handle = submit(runner, tmp_path, "2x1", "WHO=me,CODE=3")

    def log() -> str:
        return "".join(line for k in (0, 1) for line in runner.log_lines(handle, "steps", k))

    with client(tmp_path, handle, then) as (process, found):
        assert [answer[1:] for answer in found] == [[None, "me", None]] * 2
        pids = [answer[0] for answer in found]
        if not then.startswith("state"):
            assert all(map(alive, pids))
            eventually(lambda: log().count("an actor is here") == 2, "the output of the actors")
            process.send_signal(signal.SIGKILL)
        eventually(lambda: "a Monarch client has detached" in log(), "the end of the worker loops")
        eventually(lambda: not any(map(alive, pids)), "the end of the actors")
    assert runner.status(handle).state is AppState.RUNNING
    (tmp_path / "go").touch()
    status = runner.wait(handle, wait_interval=0.1)
    assert status is not None and status.state is AppState.FAILED and "code 3" in status.msg
    text = log()
    assert "a Monarch client has attached to 2 hosts" in text
    assert ("the worker loop of host 1 was shut down by its client" in text) == then.startswith("state")
    ended = re.escape(f"the job {handle} is no longer active: FAILED")
    with pytest.raises(AssertionError, match=ended), client(tmp_path, handle, ""):
        pass


def test_a_live_allocation_has_actors_with_and_without_a_run(folder: Path, tmp_path: Path) -> None:
    """The client keeps an idle allocation, and runs find nothing changed."""
    (tmp_path / "steps.py").write_text(STEPS.format(go=str(tmp_path / "go")))
    live = Live(folder, ["torchrun", "--nproc-per-node", "2", str(tmp_path / "steps.py")], idle_timeout=3).ready()
    where = f", address={str(live.target.address)!r}"
    try:
        with client(tmp_path, live.job.handle, "sys.stdin.read()\nos._exit(0)", where) as (_, found):
            assert len(found) == 1
            run = live.job.run_spmd_async(output="store")
            until(lambda: live.job.status().run is not None, "the run")
            with client(folder, live.job.handle, "sys.stdin.read()", where) as (_, others):
                assert others[0][0] != found[0][0]
            assert alive(found[0][0])
            (tmp_path / "go").touch()
            result = run.result()
            assert {rank: output.stdout for rank, output in result.output.items()} == {
                rank: f"rank {rank} steps\n" for rank in (0, 1)
            }
            assert live.job.run_spmd(output="none").exit_code == 0
            assert live.job.status().idle == 0.0
        until(lambda: live.processes[0].poll() is not None, "the end of the idle allocation")
        assert not alive(found[0][0])
    finally:
        live.kill()


RANK = """
import os, sys
from monarch.actor import Actor, endpoint
from torchx_monarch import this_job

class Sum(Actor):
    @endpoint
    def of(self, numbers):
        return os.getpid(), sum(numbers)

if os.environ["RANK"] == "0":
    job = this_job()
    workers = job.state().workers
    answers = workers.spawn_procs().spawn("sum", Sum).of.call([1, 2, 3]).get(timeout=240)
    print("sums", [answer for _, (_, answer) in answers], "of", job.sizes, flush=True)
    print("pids", *[pid for _, (pid, _) in answers], flush=True)
    {end}
"""


@pytest.mark.parametrize(("shape", "end", "code"), [("1x2", "sys.exit(3)", 3), ("2x1", "", 0)])
def test_a_rank_has_the_hosts_of_its_own_job(tmp_path: Path, runner: Runner, shape: str, end: str, code: int) -> None:
    (tmp_path / "rank.py").write_text(RANK.format(end=end))
    cfg = {"preload": "none", "grace": 5}
    handle = runner.run_component("monarch.spmd", ["-j", shape, str(tmp_path / "rank.py")], "monarch_local", cfg=cfg)
    status = runner.wait(handle, wait_interval=0.1)
    lines = "".join(runner.log_lines(handle, "rank", 0))
    hosts = int(shape[0])
    assert f"sums {[6] * hosts} of {{'rank': {hosts}}}" in lines, lines
    assert status is not None and status.state is (AppState.FAILED if code else AppState.SUCCEEDED), lines
    if code:
        assert "code 3" in status.msg
    found = re.search(r"pids (.*)", lines)
    assert found is not None and not any(alive(int(pid)) for pid in found[1].split())


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["1x1", pytest.param("2x2", marks=pytest.mark.nightly("25 s of processor time"))])
def test_the_example_trains_and_evaluates(runner: Runner, shape: str) -> None:
    """By forks of an interpreter that has imported torch, as by default."""
    words = ["-j", shape, "--env", "OMP_NUM_THREADS=1", str(EXAMPLE), "--epochs", "4"]
    handle = runner.run_component("monarch.spmd", words, "monarch_local", cfg={"grace": 5})
    status = runner.wait(handle, wait_interval=0.2)
    lines = "".join(runner.log_lines(handle, "actorsbesideranks", 0))
    assert status is not None and status.state is AppState.SUCCEEDED, lines
    hosts, nproc = map(int, shape.split("x"))
    assert f"{hosts * nproc} ranks train, {hosts} evaluator" in lines
    assert re.search(r"accuracy  \S+  .*% to .*% of 360 test images", lines), lines


JOB = """
import os, sys
from monarch.job import JobTrait, job_load
from torchx_monarch import SPMDJob, serve

command, cfg = ["torchrun", "--nproc-per-node", "1", sys.argv[1]], {"preload": "none", "grace": 5}
job, other = (serve(command, "monarch_local", cfg) for _ in range(2))
assert isinstance(job, JobTrait) and not job.active
state = job.state()
assert state.workers is state.trainer and job.active and job.apply_id
job.apply()
again = job_load()
assert again.can_run(job) and not again.can_run(other) and not job.can_run(other)
cached = SPMDJob(job.handle)
assert cached.state().workers.sizes == {"hosts": 1} and cached.apply_id == job.apply_id
other.state()
assert job_load().handle == other.handle  # of another job: it is left alone
assert job.status().ready
assert job.run_spmd(output="none").exit_code == 0
job.kill()
assert not job.active and not again.can_run(job)
print(job.handle, other.handle, flush=True)
os._exit(0)
"""


def test_an_spmd_job_is_a_job_of_monarchs(tmp_path: Path, runner: Runner) -> None:
    program = tmp_path / "program.py"
    program.write_text("print('a run')")
    (tmp_path / "job.py").write_text(JOB)
    command = [sys.executable, "job.py", str(program)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    killed, other = done.stdout.split()
    assert runner.status(killed).state is AppState.CANCELLED
    assert Allocation(other).status().ready


def test_a_client_with_another_monarch_is_told(tmp_path: Path, folder: Path) -> None:
    live = Live(folder, ["torchrun", "--nproc-per-node", "1", "nosuch.py"]).ready()
    try:
        where = f", address={str(live.target.address)!r}"
        patched = f"{where})\nfrom importlib import metadata\nmetadata.version = lambda name: '0.1'\nstr("
        why = "the hosts of monarch_local://torchx/app have torchmonarch .*, and this process 0.1"
        with pytest.raises(AssertionError, match=why), client(tmp_path, live.job.handle, "", patched):
            pass
    finally:
        live.kill()


def test_hosts_without_monarch_say_so(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "lib" / "monarch").mkdir(parents=True)
    (tmp_path / "lib" / "monarch" / "__init__.py").write_text("raise ImportError('no monarch')")
    live = Live(
        folder, ["torchrun", "--nproc-per-node", "1", "nosuch.py"], environ={"PYTHONPATH": str(tmp_path / "lib")}
    ).ready()
    try:
        why = "host 0 has no worker loop for actors: cannot start: no monarch. Install torchmonarch on all hosts"
        where = f", address={str(live.target.address)!r}"
        with pytest.raises(AssertionError, match=why), client(tmp_path, live.job.handle, "", where):
            pass
    finally:
        live.kill()
