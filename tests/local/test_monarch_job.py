# SPDX-License-Identifier: BSD-3-Clause
"""MonarchJob, SPMDJob, this_job() and monarch.controller on this machine, and a controller's script on its hosts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from torchx.runner import Runner
from torchx.specs import AppState

from tests.local.hosts import Hosts
from tests.local.monarch_programs import CONTROLLER, DOCUMENTED, EXPECTED, SETTLE
from tests.waits import WITHIN, until


def program(tmp_path: Path, text: str, *args: str, **environ: str) -> Any:
    """Run a Monarch client in a process of its own; what it prints last, read as JSON."""
    # An interpreter that has used Monarch may abort at its end: docs/explanation/upstream.md
    (tmp_path / "client.py").write_text(f"{text}\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n")
    command, env = [sys.executable, "client.py", *args], {**os.environ, **environ}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=WITHIN, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def log(runner: Runner, handle: str, role: str, k: int = 0) -> str:
    return "\n".join(runner.log_lines(handle, role, k))


@pytest.mark.nightly("5 s of processor time for each; the other tests have the parts of the program")
@pytest.mark.parametrize("kind", ["MonarchJob", "ProcessJob"])
def test_a_program_of_monarchs_documentation(tmp_path: Path, runner: Runner, kind: str) -> None:
    """The same program with Monarch's own job and with ours: the constructor is all that differs."""
    text = DOCUMENTED.replace("{JOB}", kind + "({'trainers': 2, 'dataloaders': 1})")
    text = text.replace("{OTHER}", kind + "({'trainers': 1, 'dataloaders': 1})")
    text = text.replace("{SETTLE}", SETTLE if kind == "ProcessJob" else "")
    with tempfile.TemporaryDirectory(dir="/tmp") as theirs:  # ProcessJob leaves sockets there
        environ = {"TMPDIR": theirs} if kind == "ProcessJob" else {}
        assert program(tmp_path, text, **environ) == EXPECTED
    apps = runner.list("monarch_local")
    assert [app.state for app in apps] == ([AppState.CANCELLED] if kind == "MonarchJob" else [])
    for app in apps:
        lines = log(runner, app.app_handle, "trainers") + log(runner, app.app_handle, "trainers", 1)
        assert lines.count("Hello from Monarch") == 4
        assert "Monarch internal logs" not in lines


LATER = """
import json, os, sys
from torchx_monarch import MonarchJob

job = MonarchJob({"trainers": int(sys.argv[1])}, idle_timeout=float(sys.argv[2]))
mesh = job.state().trainers
{THEN}
print(json.dumps([job.handle, job.apply_id, mesh.sizes["hosts"]]), flush=True)
"""


@pytest.mark.slow
def test_the_cached_job_is_used_while_it_lives_and_is_what_is_asked_for(tmp_path: Path, runner: Runner) -> None:
    stays, uses = LATER.replace("{THEN}", ""), "mesh.spawn_procs().initialized.get(timeout=240)"
    first = program(tmp_path, stays, "1", "0")
    assert program(tmp_path, LATER.replace("{THEN}", uses), "1", "0") == first  # another process, and the same hosts

    second = program(tmp_path, LATER.replace("{THEN}", "mesh.shutdown().get(timeout=240)"), "2", "0")
    assert second[0] != first[0] and second[2] == 2  # more is asked for
    assert runner.wait(first[0], wait_interval=0.1).state is AppState.CANCELLED  # and nobody needs the one before
    status = runner.wait(second[0], wait_interval=0.1)
    assert status.state is AppState.SUCCEEDED, status
    assert "the mesh was shut down by its client" in log(runner, second[0], "trainers")
    # What has ended is not used again; nobody comes back to the last one.
    last = program(tmp_path, stays, "2", "10")
    assert last[0] != second[0]
    assert runner.wait(last[0], wait_interval=0.1).state is AppState.SUCCEEDED
    assert "no run and no client for 10 s" in log(runner, last[0], "trainers")


def test_a_controller_has_the_meshes_of_all_roles(
    tmp_path: Path, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "main.py").write_text(CONTROLLER)
    words = ["--meshes", "trainers=2,loaders=1", "--env", "WHO=me", "main.py", "3"]
    handle = runner.run_component("monarch.controller", words, "monarch_local")
    status = runner.wait(handle, wait_interval=0.1)
    said = log(runner, handle, "trainers")
    assert "trainers [(0, 'me', False), (1, 'me', False)]" in said, said
    assert "loaders [(0, 'me', False)]" in said
    assert status.state is AppState.FAILED
    assert json.loads(status.structured_error_msg)["message"]["errorCode"] == 3
    assert "exited with code 3" in said


BATCH = """
import json, os, sys
from torchx_monarch import MonarchJob

job = MonarchJob({"trainers": 2, "loaders": 1})
if sys.argv[1:] == ["inside"]:
    state = job.state()
    print("hosts", state.trainers.sizes, state.loaders.sizes, job.active, flush=True)
    job.kill()  # is not for those within
else:
    job.apply(client_script="client.py inside")
    print(json.dumps(job.handle))
"""


def test_a_client_script_is_run_by_the_job_itself(tmp_path: Path, runner: Runner) -> None:
    handle = program(tmp_path, BATCH)
    status = runner.wait(handle, wait_interval=0.1)
    said = log(runner, handle, "trainers")
    assert "hosts {'hosts': 2} {'hosts': 1} True" in said, said
    assert status.state is AppState.SUCCEEDED
    assert [app.app_handle for app in runner.list("monarch_local")] == [handle]


MOUNTS = """
import json, os, sys
from monarch.actor import Actor, endpoint
from torchx.specs import AppDef, Role
from torchx_monarch import MonarchJob, serve

class Files(Actor):
    @endpoint
    def copy(self, source, target):
        os.makedirs(target)
        with open(source) as file, open(target + "/copy.txt", "w") as copy:
            copy.write(file.read() + " to " + target)

source, mounted, made, gathered = sys.argv[1:]
if {SPMD}:
    command = ["--nnodes", "2", "--nproc-per-node", "1", "nosuch.py"]
    app = AppDef("a", [Role("trainers", image="", entrypoint="torchrun", args=command, num_replicas=2)])
    job = serve(app, "monarch_local", {"preload": "none", "grace": 5})
    job.gather_mount(made + "/$SUBDIR", gathered, meshes=["workers"])
    try:
        job.remote_mount(source, mounted, meshes=["trainer"], python_exe=None)
    except ValueError as error:
        assert str(error) == f"meshes=['trainer']: {job.handle} has no 'trainer', but trainers", error
else:
    job = MonarchJob({"trainers": 2})
    job.gather_mount(made + "/$SUBDIR", gathered)
job.remote_mount(source, mounted, python_exe=None)
files = job.state(cached_path=None).trainers.spawn_procs().spawn("files", Files)
for host in range(2):
    files.slice(hosts=host).copy.call(mounted + "/a.txt", f"{made}/hosts_{host}").get(timeout=240)
said = {host: open(f"{gathered}/{host}/copy.txt").read() for host in sorted(os.listdir(gathered))}
job.kill()
print(json.dumps(said), flush=True)
"""


@pytest.mark.skipif(
    not (shutil.which("fusermount3") and os.access("/dev/fuse", os.R_OK | os.W_OK)),
    reason="Monarch's mounts need /dev/fuse and fusermount3 (Debian: fuse3)",
)
@pytest.mark.parametrize("spmd", [False, pytest.param(True, marks=pytest.mark.nightly("that each host counts once"))])
def test_folders_are_mounted_on_hosts_and_from_them(tmp_path: Path, runner: Runner, spmd: bool) -> None:
    names = [str(tmp_path / name) for name in ("source", "mounted", "made", "gathered")]
    for name in ("source", "gathered"):
        (tmp_path / name).mkdir()
    (tmp_path / "source" / "a.txt").write_text("mounted")
    try:
        said = program(tmp_path, MOUNTS.replace("{SPMD}", str(spmd)), *names)
        until(lambda: str(tmp_path) not in Path("/proc/mounts").read_text(), "the mounts to be gone")
    finally:
        for mounted in (names[1], names[1], names[3]):  # nobody could remove the folder around one that is left
            subprocess.run(["fusermount3", "-u", "-z", mounted], capture_output=True, check=False, timeout=WITHIN)
    assert said == {f"hosts_{host}": f"mounted to {names[2]}/hosts_{host}" for host in range(2)}


SERVED = """
import json, os, subprocess, sys, urllib.request
from monarch.actor import Actor, endpoint
from monarch.job import MeshAdminConfig, job_load
from torchx.specs import AppDef, Role
from torchx_monarch import serve

class Evaluator(Actor):
    @endpoint
    def place(self):
        return os.getpid()

def evaluate(mesh):
    found = mesh.spawn_procs(name="evaluators").spawn("evaluator", Evaluator).place.call().get(timeout=240)
    return [pid for _, pid in found]

if sys.argv[1:]:  # in the second process
    state = job_load(sys.argv[1]).state(cached_path=None)
    print(json.dumps([sorted(evaluate(state.loaders)), job_load(sys.argv[1]).apply_id]), flush=True)
    os._exit(0)

command = ["--nnodes", "1:2", "--nproc-per-node", "1", "nosuch.py"]
roles = [Role(name, image="", entrypoint="torchrun", args=command, num_replicas=hosts)
         for name, hosts in (("train-ers", 1), ("loaders", 2))]
job = serve(AppDef("a", roles), "monarch_local", {"preload": "none", "grace": 5})
job.enable_telemetry(mesh_admin_config=MeshAdminConfig("127.0.0.1:0"))
state = job.state(cached_path=None)
pids = evaluate(state.loaders)
with urllib.request.urlopen(state.admin_url + "/v1/root", timeout=60) as answer:
    hosts = json.load(answer)["children"]
with urllib.request.urlopen(state.admin_url + "/v1/tree", timeout=60) as answer:
    tree = answer.read().decode()
query = "select count(*) from actors where full_name like 'evaluator%'"
rows = state.query_engine_client.query(query, timeout=120)["rows"]
with open("job", "wb") as file:
    file.write(job.dumps())
done = subprocess.run([sys.executable, __file__, "job"], stdout=subprocess.PIPE, text=True, timeout=200, check=True)
others, apply_id = json.loads(done.stdout.splitlines()[-1])
said = {
    "sizes": [state.workers.sizes, getattr(state, "train-ers").sizes, state.loaders.sizes],
    "first": state.workers is getattr(state, "train-ers"),
    "admin": [sum("/worker" in host for host in hosts), tree.count("evaluators") > 0],
    "telemetry": [list(row.values())[0] > 0 for row in rows],
    "second": [len(others), set(others).isdisjoint(pids), apply_id == job.apply_id],
}
job.kill()
print(json.dumps(said), flush=True)
"""


@pytest.mark.slow
@pytest.mark.nightly("9 s of processor time, most of it for Monarch's own telemetry")
def test_a_served_app_has_meshes_an_admin_and_telemetry_and_a_second_process_loads_it(
    tmp_path: Path, runner: Runner
) -> None:
    assert program(tmp_path, SERVED) == {
        "sizes": [{"hosts": 1}, {"hosts": 1}, {"hosts": 2}],
        "first": True,
        "admin": [3, True],
        "telemetry": [True],
        "second": [2, True, True],
    }
    (app,) = runner.list("monarch_local")
    assert app.state is AppState.CANCELLED


def test_hosts_that_never_come_are_said_to_be_missing(tmp_path: Path, runner: Runner) -> None:
    text = """
import json
from torchx.specs import AppDef, Role
from torchx_monarch import MonarchJob
job = MonarchJob(AppDef("a", [Role("t", image="", entrypoint="x")]), scheduler_cfg={"host_timeout": 1})
job._app.roles[0].env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "soon"  # which the host does not take
try:
    job.state(cached_path=None)
except RuntimeError as error:
    print(json.dumps(str(error)))
"""
    said = program(tmp_path, text)
    assert "has ended (FAILED)" in said
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT='soon' is not a number" in said


def test_this_job_is_for_scripts_of_a_job(tmp_path: Path) -> None:
    text = """
import json
from torchx_monarch import this_job
try:
    this_job()
except RuntimeError as error:
    print(json.dumps(str(error)))
"""
    assert program(tmp_path, text).startswith("this_job() is for the ranks of a job (torchx run -s monarch_local")


COMMAND = ["python", "-m", "torchx_monarch.actors", "--", "python"]


def test_a_script_is_stopped_with_its_host(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b'saved\\n'), sys.exit(0)))\n"
        "print('begun', os.environ['RANK'], os.environ['WORLD_SIZE'], flush=True)\n"
        "time.sleep(1000)\n"
    )
    hosts = Hosts(folder, [*COMMAND, str(script)], replicas=2).start()
    until(lambda: "begun 0 1" in hosts.out(), "the script")
    hosts.processes[0].send_signal(signal.SIGTERM)
    assert hosts.wait() == [143, 143]
    assert "saved" in hosts.out() and "begun" not in hosts.out(1)
    assert "preempted" in hosts.err()


def test_a_script_that_is_not_there_is_said_to_be_missing(folder: Path) -> None:
    hosts = Hosts(folder, [*COMMAND, "nosuch.py"], replicas=2).start(1)
    # Those that come late are told for a moment only (see tests/unit/test_rendezvous.py).
    until(lambda: any(folder.glob("h*/attach")), "the host to look for replica 0")
    hosts.start(0)
    assert hosts.wait() == [2, 2]
    assert "nosuch.py': No such file or directory" in hosts.err()
