# SPDX-License-Identifier: BSD-3-Clause
"""Allocations taken from a program and used from a shell, on monarch_local: each command in a process of its own."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from torchx.runner import Runner
from torchx.specs import AppDef, Role

import torchx_monarch
from tests.contract.place import TORCHX
from tests.fork_server import run_torchx
from tests.waits import WITHIN, until
from torchx_monarch import SPMDError, serve
from torchx_monarch.exceptions import AllocationError, RefusedError, UnreachableError

CFG = {"preload": "none", "grace": 3}
torchx = partial(run_torchx, check=True)


@pytest.fixture
def jobs() -> Iterator[list[torchx_monarch.SPMDJob]]:
    """What is put in ends with the test."""
    found: list[torchx_monarch.SPMDJob] = []
    yield found
    for job in found:
        job.release()
        over(job)


def over(job: torchx_monarch.SPMDJob) -> str:
    """The state in which it ended."""
    until(lambda: job.status().state in ("SUCCEEDED", "FAILED", "CANCELLED"), "the end", every=0.05)
    return job.status().state


def test_serve_leaves_the_app_as_it_is_and_holds_each_of_its_roles(
    jobs: list[torchx_monarch.SPMDJob],
    script: Callable[[str], str],
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = script("print(sys.argv[1], rank, os.environ['WORLD_SIZE'], os.environ.get('OF_ROLE'))")
    trainer = ["--nnodes", "2", "--nproc-per-node", "1", path, "trainer"]
    app = AppDef(
        "two",
        [
            Role("trainer", image="", entrypoint="torchrun", args=trainer, num_replicas=2, env={"OF_ROLE": "t"}),
            Role("evaluator", image="", entrypoint="bash", args=["-c", f"export A=1; torchrun {path} evaluator"]),
        ],
    )
    before = copy.deepcopy(app)
    monkeypatch.chdir(tmp_path)
    cached = tmp_path / ".monarch/job_state.pkl"
    cached.parent.mkdir()
    cached.touch()
    job = serve(app, scheduler="monarch_local", scheduler_cfg=CFG)
    jobs.append(job)
    assert app == before and not cached.exists()
    assert f"removing the cached state of a job, {cached}: it is of an earlier job" in caplog.text
    assert capfd.readouterr().err == f"[monarch] launched {job.handle}\n"
    said: list[str] = []
    assert job.wait_ready(WITHIN, said.append) is job
    assert all(line.startswith("waiting for ") for line in said)
    result = job.run_spmd()
    assert sorted(capfd.readouterr().out.splitlines()) == ["trainer 0 2 t", "trainer 1 2 t"]
    assert result.exit_codes == {0: 0, 1: 0}
    other = torchx_monarch.SPMDJob.attach(job.handle, "evaluator")
    other.wait_ready(WITHIN).run_spmd()
    assert capfd.readouterr().out == "evaluator 0 1 None\n"
    assert job.status().runs == other.status().runs == 1 and job.status().hosts.keys() == {0, 1}
    # What TorchX shows is the app, with nothing of ours but that it waits.
    described = torchx("describe", job.handle).stdout
    assert "torchx_monarch.hosts" in described and 'torchx_monarch.host"' not in described
    torchx_monarch.SPMDJob.attach(job.handle, "trainer").release()  # the app ends with this role
    assert over(job) == "SUCCEEDED"


def test_release_through_another_role_leaves_no_hosts(
    jobs: list[torchx_monarch.SPMDJob], script: Callable[[str], str]
) -> None:
    roles = [Role(name, image="", entrypoint="torchrun", args=[script("")]) for name in ("trainer", "evaluator")]
    job = serve(AppDef("two", roles), scheduler_cfg=CFG, role="evaluator")
    jobs.append(job)
    job.wait_ready(WITHIN).release()
    assert over(job) == over(torchx_monarch.SPMDJob.attach(job.handle)) == "CANCELLED"


def test_exec_from_another_shell_when_who_took_the_hosts_is_gone(
    jobs: list[torchx_monarch.SPMDJob], script: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = script("""
        print("out", rank, flush=True)
        print("err", rank, file=sys.stderr, flush=True)
        open(f"{sys.argv[0]}.{rank}", "w").close()
        while not all(os.path.exists(f"{sys.argv[0]}.{each}") for each in (0, 1)):
            time.sleep(0.02)
        sys.exit(5 * rank)  # which has the other one stopped
    """)
    serving = f"serve(['torchrun', {path!r}], scheduler_cfg={CFG!r}, idle_timeout=1000)"
    code = f"from torchx_monarch import serve; print({serving}.handle)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    handle = done.stdout.split()[-1]
    jobs.append(torchx_monarch.SPMDJob(handle))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "caller.json"))
    done = torchx("monarch", "exec", handle, "--", "torchrun", "--nproc-per-node", "2", path, check=False)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert done.returncode == 5
    assert sorted(done.stdout.splitlines()) == ["out 0", "out 1"]
    assert "err 1" in done.stderr
    message = json.loads((tmp_path / "caller.json").read_text())["message"]
    assert message["message"].startswith("rank 1 (local rank 1 on ") and message["errorCode"] == 5
    summary = done.stderr[done.stderr.index("FAILED after ") :].splitlines()
    assert summary[0].endswith(f" s: run 1 on {handle}") and len(summary) <= 6
    assert summary[1].startswith("  cause:  rank 1 (local rank 1 on ")
    assert torchx("monarch", "exec", handle).returncode == 0
    runs = [line.split() for line in torchx("monarch", "ps", handle).stdout.splitlines()]
    assert [row[:3] for row in runs[1:]] == [["1", "failed", "5"], ["2", "succeeded", "0"]] and runs[1][-1] == path
    assert torchx("monarch", "follow", handle, "1", check=False).returncode == 5
    torchx("monarch", "stop", handle)
    assert over(jobs[0]) == "SUCCEEDED"
    lines = torchx("log", f"{handle}/trainer/0").stdout
    assert "released by its client" in lines and "out 1" in lines
    assert torchx("monarch", "exec", handle, check=False).returncode == 69
    for command in ("ps", "follow"):
        done = torchx("monarch", command, handle, check=False)
        assert done.returncode == 69 and f"{handle} has ended (SUCCEEDED)" in done.stderr
        assert f"Its log: torchx log {handle}" in done.stderr


DEFAULT_SIGHUP = (
    "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])"
)


def test_ctrl_c_and_signals_stop_the_run_and_not_the_allocation(
    jobs: list[torchx_monarch.SPMDJob], script: Callable[[str], str]
) -> None:
    path = script("""
        signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"told to stop\\n"))
        print("begun", flush=True)
        time.sleep(1000) if len(sys.argv) < 2 else None
        time.sleep(1000) if len(sys.argv) < 2 else None
    """)
    job = serve(["torchrun", path], scheduler_cfg={**CFG, "grace": 1000})
    jobs.append(job)
    job.wait_ready(WITHIN)
    for run, number, name in (1, signal.SIGINT, ""), (2, signal.SIGTERM, " (SIGTERM)"):
        # What nohup ignores would be ignored here, too.
        exec = [sys.executable, "-c", DEFAULT_SIGHUP, *TORCHX, "monarch", "exec", job.handle]
        with subprocess.Popen(exec, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as shell:
            until(lambda run=run: job.status().run == run and list(job.logs(run=run)) == ["begun"], "the run")
            shell.send_signal(number)
            until(lambda run=run: list(job.logs(run=run)) == ["begun", "told to stop"], "the rank's SIGTERM")
            if number == signal.SIGTERM:
                shell.send_signal(signal.SIGHUP)  # systemd sends both
            shell.send_signal(signal.SIGINT)
            out, err = (text.decode() for text in shell.communicate(timeout=240))  # less than the grace
        assert shell.returncode == 128 + number and out == "begun\ntold to stop\n", err
        assert f"stopping run {run}{name}; Ctrl-C again kills it" in err and f"killing run {run}" in err
    assert job.run_spmd([path, "again"]).exit_code == 0
    assert torchx("monarch", "stop", job.handle, "--run", "1", check=False).returncode == 0  # it has ended already
    assert job.status().ready
    torchx("monarch", "stop", job.handle)
    assert over(job) == "SUCCEEDED"


REQUESTS: dict[str, Callable[[torchx_monarch.SPMDJob], object]] = {
    # Everything that needs the hosts.
    "runs": lambda job: job.runs(),
    "follow": lambda job: job.follow(),
    "logs": lambda job: list(job.logs()),
    "cancel_run": lambda job: job.cancel_run(),
    "run_spmd": lambda job: job.run_spmd(output="none"),
    "run_spmd_async": lambda job: job.run_spmd_async(output="none").result(WITHIN),
}


def test_all_requests_wait_for_the_hosts_and_say_when_they_have_ended(
    script: Callable[[str], str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = script("print('rank', rank)")
    waits = f"until test -e '{tmp_path}/go'; do sleep 0.05; done; torchrun --nproc-per-node 2 '{path}'"
    app = AppDef("app", [Role("trainer", image="", entrypoint="bash", args=["-c", waits])])
    with serve(app, scheduler_cfg=CFG, start_timeout=WITHIN) as job:
        assert job.handle in capfd.readouterr().err
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(job.runs)  # when nothing listens yet
            said = str(until(lambda: capfd.readouterr().err, "the wait"))
            assert said.startswith("[monarch] waiting for the hosts ("), said
            (tmp_path / "go").touch()
            assert asked.result() == []
        attached = torchx_monarch.SPMDJob.attach(job.handle)
        for name in ("follow", "logs", "cancel_run"):
            with pytest.raises(RefusedError, match="a run is not known here; the last was none"):
                REQUESTS[name](attached)
        assert attached.run_spmd(output="none").exit_code == 0
        assert job.run_spmd_async(output="none").result(WITHIN).run == 2
    for name, request in REQUESTS.items():
        for one in (job, attached, torchx_monarch.SPMDJob(job.handle)):
            with pytest.raises(AllocationError, match=rf"{job.handle} has ended \(SUCCEEDED\)"):
                pytest.fail(f"{name} of a killed job: {request(one)}")
    with pytest.raises(AllocationError, match="has ended"):
        job.wait_ready()
    assert job.status().state == "SUCCEEDED"


def test_a_run_is_lost_with_its_hosts(jobs: list[torchx_monarch.SPMDJob], script: Callable[[str], str]) -> None:
    """The whole app disappears at once: nobody is left who could tell its client."""
    path = script("print('begun', os.getpid(), os.getppid(), flush=True)\ntime.sleep(1000)")
    jobs.append(job := serve(["torchrun", path], scheduler_cfg=CFG))
    handle = job.run_spmd_async(output="none")
    until(lambda: list(job.logs()), "the rank")
    os.kill(int(next(job.logs()).split()[2]), signal.SIGKILL)  # the host
    error = handle.exception(WITHIN)
    assert isinstance(error, UnreachableError) and f"run 1 lost its connection: {job.handle} has ended (FAILED)" in str(
        error
    )
    assert not handle.cancel()


def test_the_component_and_what_is_refused(jobs: list[torchx_monarch.SPMDJob], tmp_path: Path, runner: Runner) -> None:
    handle = torchx("run", "-s", "monarch_local", "-cfg", "preload=none", "monarch.hosts", "-j", "2x1").stdout.split()[
        0
    ]
    job = torchx_monarch.SPMDJob(handle)
    jobs.append(job)
    job.wait_ready(WITHIN)
    with pytest.raises(RuntimeError, match="nothing to run: this allocation has no command of its own"):
        job.run_spmd()
    assert job.run_spmd("python -c 'import sys; print(sys.argv[1:])' 'a b' c", output="store").output[0].stdout == (
        "['a b', 'c']\n"
    )
    with pytest.raises(ValueError, match='No closing quotation in "train.py \'a"'):
        job.run_spmd("train.py 'a")
    words = ["monarch", "exec", handle, "--", "torchrun", "--no-python", "sh", "-c", "echo $RANK of $WORLD_SIZE"]
    assert sorted(torchx(*words).stdout.splitlines()) == ["0 of 2", "1 of 2"]
    with pytest.raises(SPMDError, match="can't open file .*sh': .*For the program: torchrun --no-python sh"):
        job.run_spmd(["sh", "-c", "true"], output="none")
    for options, why in (
        ("--timeout -1", "timeout=-1.0: give a number of seconds above 0, or None for no limit"),
        ("--nproc 0", "nproc='0': give a number from 1 to 65536, or one of auto, gpu, cpu, xpu"),
        ("--cwd there", "cwd of the run, 'there', is no absolute path"),
        ("--cwd /a --workspace /b", "give cwd='/a', a folder that the hosts have, or workspace='/b', not both"),
    ):
        done = torchx("monarch", "exec", handle, *options.split(), "--", "python", "x.py", check=False)
        assert done.returncode == os.EX_USAGE and done.stderr == f"[monarch] {why}\n"
    for strange, code, why in (
        ("nonsense", 66, "there is no app 'nonsense'"),
        ("nosuch://torchx/x", 64, "there is no scheduler nosuch"),
        ("monarch_local://torchx/nosuch", 66, "there is no app 'monarch_local://torchx/nosuch'"),
    ):
        done = torchx("monarch", "exec", strange, "--", "python", "x.py", check=False)
        assert done.returncode == code and why in done.stderr and "Traceback" not in done.stderr
    for bad, why in (
        (["echo", "hello"], "no role of app 'spmd-job'|not a torchrun or Python command"),
        (["torchrun", "--nosuch", "x.py"], "no option --nosuch"),
        ("torchrun --nosuch 'x y.py'", "no option --nosuch"),
        ("torchrun 'x.py", 'No closing quotation in "torchrun \'x.py"'),
        ("", "not a torchrun or Python command: ''"),
        ("train.py --lr 1", r"not a torchrun or Python command: .*\. For a script: python train\.py --lr 1"),
    ):
        with pytest.raises(ValueError, match=why):
            serve(bad)
    app = AppDef("a", [Role("sidecar", image="", entrypoint="sleep"), Role("t", "", entrypoint="torchrun", args=["x"])])
    for wrong, why in (
        ({"role": "nope"}, "role='nope': the roles of app 'spmd-job' with hosts for runs are trainer"),
        ({"appdef": app, "role": "sidecar"}, "role='sidecar': the roles of app 'a' with hosts for runs are t"),
        ({"workspace": "/nope"}, "workspace='/nope': there is no such folder"),
        ({"appdef": app, "name": "b"}, "name='b' is for a command; that of an AppDef is its own"),
        ({"scheduler": "monarch-local"}, "there is no scheduler monarch-local. Did you mean monarch_local?"),
        (
            {"appdef": "torchrun --standalone --nnodes 2 x"},
            "for one node, but the allocation has 2 hosts. Leave it out",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(why)):
            serve(**{"appdef": "torchrun x.py", **wrong})
    assert [app.app_handle for app in runner.list("monarch_local")] == [handle]  # nothing was submitted
    jobs.append(serve("torchrun x.py", scheduler_cfg=CFG, name="named"))
    assert jobs[-1].handle.startswith("monarch_local://torchx/named-")
    with pytest.raises(TypeError, match="appdef={'trainers': 2}: give an AppDef, or a torchrun or Python command"):
        serve({"trainers": 2})
    with pytest.raises(ValueError, match="local_cwd"):
        serve(["torchrun", "x.py"], scheduler="local_cwd")
    elsewhere = subprocess.run(
        [sys.executable, "-m", "torchx_monarch.hosts"], capture_output=True, text=True, timeout=WITHIN
    )
    assert elsewhere.returncode == os.EX_CONFIG and "monarch_slurm" in elsewhere.stderr
