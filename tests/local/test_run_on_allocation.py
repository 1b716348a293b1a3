# SPDX-License-Identifier: BSD-3-Clause
"""Jobs that run on the hosts of a live allocation: ``-cfg on=``."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torchx.runner import Runner
from torchx.specs import AppDef, AppState, Resource, Role

from tests.fork_server import run_torchx
from tests.waits import until
from torchx_monarch.insight import events

SCRIPT = """
import torchx_monarch
torchx_monarch.progress(3, loss=0.5)
print(sys.argv[1:], os.environ["LR"], os.environ["WORLD_SIZE"], flush=True)
if sys.argv[1] == "waits":
    time.sleep(1000)
if sys.argv[1] == "fails" and rank == 1 and not os.path.exists(sys.argv[2]):
    open(sys.argv[2], "w").close()
    raise ValueError("planted")
"""


def app_of(path: str, *args: str, shell: bool = False, **changes: Any) -> AppDef:
    words = ["torchrun", "--nnodes", "2", "--nproc-per-node", "1", "--tee", "3", path, *args]
    if shell:
        words = ["bash", "-c", shlex.join(words)]
    role = Role("train", "", entrypoint=words[0], args=words[1:], num_replicas=2, env={"LR": "a b"}, **changes)
    return AppDef("train", [role])


def kill_process(handle: str) -> None:
    """Kill the process of a job, which is not asked to end its run."""
    folder = json.loads(run_torchx("monarch", "status", "--json", handle).stdout)["log_folder"]
    happened = events.read(Path(folder).parent / events.FILE)[0]
    os.kill(next(event["pid"] for event in happened if event["kind"] == "replica_started"), signal.SIGKILL)


def test_jobs_run_on_hosts_that_are_there_one_after_the_other(
    runner: Runner, script: Callable[[str], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from torchx_monarch import SPMDJob

    path, once = script(SCRIPT), str(tmp_path / "once")

    def submit(*args: str, on: str = "last", **changes: Any) -> str:
        cfg = {"on": on, "on_end": f"cat > {tmp_path}/end_{args[0]}"}
        return str(runner.run(app_of(path, *args, **changes), "monarch_local", cfg=cfg))

    def ended(handle: str) -> AppState:
        status = runner.wait(handle, wait_interval=0.1)
        assert status is not None
        return status.state

    resources = ["--cpu", "2", "--memMB", "2000", "--gpu", "1"]
    hosts = str(
        runner.run_component("monarch.hosts", ["-j", "2x1", *resources], "monarch_local", cfg={"preload": "none"})
    )
    job = SPMDJob.attach(hosts).wait_ready()
    caplog.clear()
    try:
        waits = submit("waits", shell=True, resource=Resource(cpu=1, gpu=1, memMB=100))
        assert "asks for --gpu" not in caplog.text, "its process needs none of this machine"
        until(lambda: [run["state"] for run in job.runs()] == ["running"], "the first job runs")
        killed = submit("waits")
        until(lambda: len(job.runs()) == 2, "the second job waits for it")
        queued = submit("works", on=hosts, shell=True)
        fails, retried = submit("fails", once, on="hosts"), submit("fails", f"{once}_more", max_retries=1)
        until(lambda: len(job.runs()) == 5, "the other jobs wait for it")
        for handle in (waits, hosts):
            done = run_torchx("cancel", "--save", handle)
            assert done.returncode == 64 and "has no ranks of its own that could save" in done.stderr
        assert [run["state"] for run in job.runs()][0] == "running"
        assert "ranks 0-1: main thread" in run_torchx("monarch", "stacks", waits).stdout
        status = json.loads(run_torchx("monarch", "status", "--json", waits).stdout)
        assert (status["phase"], status["attempt"], status["ranks"]) == ("running", 1, 2)
        assert [rank["state"] for rank in status["activity"]] == ["running"] * 2
        status = json.loads(run_torchx("monarch", "status", "--json", queued).stdout)
        assert (status["phase"], status["activity"], status["silent"]) == ("queued", None, None)
        stacks = run_torchx("monarch", "stacks", queued)
        assert stacks.returncode and f"{queued} waits for its turn on {hosts}, which has run 1 now" in stacks.stderr
        done = run_torchx("monarch", "ps", waits)
        assert done.returncode and f"{waits} has no hosts: its ranks run on the hosts of {hosts}" in done.stderr
        runner.cancel(waits)
        assert ended(waits) == AppState.CANCELLED
        assert json.loads((tmp_path / "end_waits").read_text())["state"] == "CANCELLED"
        until(lambda: [run["state"] for run in job.runs()][1] == "running", "the second job runs")
        kill_process(killed)
        states = {name: ended(handle) for name, handle in (("killed", killed), ("queued", queued), ("fails", fails))}
        assert states == {"killed": AppState.FAILED, "queued": AppState.SUCCEEDED, "fails": AppState.FAILED}
        assert ended(retried) == AppState.SUCCEEDED
        lines = [line.strip() for line in runner.log_lines(queued, "train")]
        works = ["[default0]:['works'] a b 2", "[default1]:['works'] a b 2"]
        assert sorted(line for line in lines if "works'" in line) == works
        waited = f"[monarch] run 3 waits for its turn on {hosts}; runs before it: 2"
        for text in (waited, "[monarch] run 3: torchrun --nnodes 2", "[monarch] run 3 SUCCEEDED: all 2 ranks"):
            assert any(line.startswith(text) for line in lines), lines
        assert run_torchx("monarch", "logs", queued, "--rank", "1").stdout == "[1] ['works'] a b 2\n"
        assert [*runner.log_lines(queued, "train", 1)] == []
        stacks = run_torchx("monarch", "stacks", queued)
        assert stacks.returncode and f"{queued} was run 3 of {hosts}, which has no run now" in stacks.stderr
        status = json.loads(run_torchx("monarch", "status", "--json", queued).stdout)
        assert status["account"]["lost"]["waiting"] > 0
        assert (status["step"], status["metrics"][0]["name"], status["metrics"][0]["last"]) == (3, "loss", 0.5)
        page = run_torchx("monarch", "report", retried, "-o", "-").stdout
        for text in ("run 5: torchrun", "run 6: torchrun", "<td>train/1</td>", "ValueError: planted"):
            assert text in page
        status = run_torchx("monarch", "status", fails)
        for text in ("FAILED", "rank 1 (", "ValueError: planted", "2x1 (world size 2)", f"{path}, line"):
            assert text in status.stdout, status.stdout
        ends = ["stopped", "stopped", "succeeded", "failed", "failed", "succeeded"]
        assert [run["state"] for run in job.runs()] == ends

        def refused(app: AppDef, on: str = "last") -> str:
            with pytest.raises(ValueError) as caught:
                runner.dryrun(app, "monarch_local", cfg={"on": on})
            return str(caught.value)

        one = app_of(path)
        one.roles[0].num_replicas, one.roles[0].args[1] = 1, "1"
        assert f"'train' has 1 hosts, and on {hosts} there are 2" in refused(one)
        large = app_of(path, resource=Resource(cpu=1, gpu=8, memMB=100))
        assert f"'train' asks for gpu 8, and on {hosts} a host has 1" in refused(large)
        spare = app_of(path, metadata={"monarch": {"spares": 1}})
        assert "'train' has 1 spare hosts" in refused(spare)
        assert f"{queued} does not run" in refused(app_of(path), on=queued)
        assert "names no app" in refused(app_of(path), on="nosuch")
        assert "a handle is SCHEDULER://SESSION/APP" in refused(app_of(path), on="://")
        shell = AppDef("app", [Role("say", "", entrypoint="sh", args=["-c", "cd /tmp && torchrun x.py"])])
        assert "runs torchrun and Python commands, with nothing beside them" in refused(shell)
        assert "of one role, and app 'two' also has b" in refused(AppDef("two", [Role("a", ""), Role("b", "")]))
        last = submit("waits", max_retries=1)
        until(lambda: [run["state"] for run in job.runs()][-1] == "running", "the last job runs")
    finally:
        job.release()
    assert ended(last) == AppState.FAILED
    assert f"{hosts} has ended" in json.loads(run_torchx("monarch", "status", "--json", last).stdout)["cause"]
    assert "[monarch] run 7: the hosts have ended: released by its client" in run_torchx("log", last).stdout
    assert "no live allocation is running. To get one: torchx run" in refused(app_of(path))


@pytest.mark.nightly("10 s of processor time: two jobs that train; what they use is tested every time")
@pytest.mark.parametrize("options", [[], ["--on-allocation"]], ids=["own_hosts", "on_allocation"])
def test_the_example_of_a_sweep(options: list[str], leaves_nothing: None) -> None:
    example = Path(__file__).parents[2] / "examples" / "sweep.py"
    command = [sys.executable, str(example), "--rates", "0.002,0.01", "--epochs", "2", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("SUCCEEDED  accuracy 9") == 2
