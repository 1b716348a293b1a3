# SPDX-License-Identifier: BSD-3-Clause
"""The hosts of ranks as a Monarch host mesh: clients attach, spawn actors, and detach or die; the ranks go on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torchx.runner import Runner
from torchx.specs import AppState

import torchx_monarch
from tests.local.detached import lives
from tests.local.hosts import Hosts
from tests.local.live import Live
from tests.local.terminal import Terminal
from tests.waits import WITHIN, until
from torchx_monarch.client.connection import Connection
from torchx_monarch.exceptions import RefusedError
from torchx_monarch.host import worker_loop_main as worker_loop
from torchx_monarch.model.env_names import keep_monarch_log_private
from torchx_monarch.system import processes
from torchx_monarch.transport import messages

EXAMPLE = Path(__file__).parents[2] / "examples" / "actors_beside_ranks.py"

STEPS = """
import os, sys, time
print("rank", os.environ["RANK"], "steps", flush=True)
while not os.path.exists({go!r}):
    time.sleep(0.01)
sys.exit(int(os.environ.get("CODE", "0")))
"""

CLIENT = """
import json, os, subprocess, sys
from monarch.actor import Actor, endpoint
from torchx_monarch import SPMDJob

class Where(Actor):
    @endpoint
    def am_i(self):
        print("an actor is here", flush=True)
        self.server = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        seen = [os.environ.get(name) for name in ("RANK", "WHO", "MONARCH_CREDENTIALS")]
        return [os.getpid(), self.server.pid], seen

job = SPMDJob.attach({handle!r}{where})
state = job.state(cached_path=None)
actors = state.workers.spawn_procs().spawn("where", Where)
found = [answer for _, answer in actors.am_i.call().get(timeout=240)]
print(json.dumps(found), flush=True)
{then}
"""
"""A Monarch client of a job's hosts, which prints what an actor on each of them sees."""


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


def submit(runner: Runner, tmp_path: Path, shape: str, env: str) -> str:
    (tmp_path / "steps.py").write_text(STEPS.format(go=str(tmp_path / "go")))
    words = ["-j", shape, "--env", env, str(tmp_path / "steps.py")]
    cfg = {"preload": "none", "grace": 5}
    handle: str = runner.run_component("monarch.spmd", words, "monarch_local", cfg=cfg)
    return handle


_SHUTDOWN = "state.workers.shutdown().get(timeout=60); sys.stdin.read()"
_NIGHTLY = pytest.mark.nightly("2.5 s of processor time; test_monarch_job.py shuts a mesh down every time")


@pytest.mark.parametrize("then", ["sys.stdin.read()", pytest.param(_SHUTDOWN, marks=_NIGHTLY, id="shutdown")])
def test_a_client_of_a_batch_job_spawns_actors_and_dies(tmp_path: Path, runner: Runner, then: str) -> None:
    handle = submit(runner, tmp_path, "2x1", "WHO=me,CODE=3")

    def log() -> str:
        return "".join(line for k in (0, 1) for line in runner.log_lines(handle, "steps", k))

    with client(tmp_path, handle, then) as (process, found):
        assert [seen for _, seen in found] == [[None, "me", None]] * 2
        pids = [pid for own, _ in found for pid in own]
        if not then.startswith("state"):
            assert all(map(lives, pids))
            until(lambda: log().count("an actor is here") == 2, "the output of the actors")
            process.send_signal(signal.SIGKILL)
        until(lambda: "a Monarch client has detached" in log(), "the end of the worker loops")
        until(lambda: not any(map(lives, pids)), "the end of the actors")
    assert runner.status(handle).state is AppState.RUNNING
    (tmp_path / "go").touch()
    status = runner.wait(handle, wait_interval=0.1)
    assert status is not None and status.state is AppState.FAILED and "code 3" in status.msg
    text = log()
    assert "a Monarch client has attached to 2 hosts" in text
    assert ("the worker loop of host 1 was shut down by its client" in text) == then.startswith("state")
    if not then.startswith("state"):
        ended = re.escape(f"{handle} has ended (FAILED)")
        with pytest.raises(AssertionError, match=ended), client(tmp_path, handle, ""):
            pass


def test_a_live_allocation_has_actors_with_and_without_a_run(
    live: Callable[..., Live], folder: Path, tmp_path: Path
) -> None:
    """The client keeps an idle allocation, and runs find nothing changed."""
    (tmp_path / "steps.py").write_text(STEPS.format(go=str(tmp_path / "go")))
    hosts = live("torchrun", "--nproc-per-node", "2", str(tmp_path / "steps.py"), idle_timeout=8)
    where = f", address={str(hosts.target.address)!r}"
    run = hosts.job.run_spmd_async(output="store")
    with client(tmp_path, hosts.job.handle, "sys.stdin.read()\nos._exit(0)", where) as (_, found):
        assert len(found) == 1
        (tmp_path / "go").touch()
        result = run.result()
        assert {rank: output.stdout for rank, output in result.output.items()} == {
            rank: f"rank {rank} steps\n" for rank in (0, 1)
        }
        with client(folder, hosts.job.handle, "sys.stdin.read()", where) as (_, others):
            assert others[0][0] != found[0][0]
        assert hosts.job.run_spmd(output="none").exit_code == 0
        assert all(map(lives, found[0][0]))
        assert hosts.job.status().idle == 0.0
    until(lambda: hosts.processes[0].poll() is not None, "the end of the idle allocation")
    until(lambda: not any(map(lives, found[0][0])), "the end of the actor")


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
    sys.exit(3)
"""


def test_a_rank_that_fails_ends_the_actors_of_its_own_job(tmp_path: Path, runner: Runner) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    cfg = {"preload": "none", "grace": 5}
    handle = runner.run_component("monarch.spmd", ["-j", "1x2", str(tmp_path / "rank.py")], "monarch_local", cfg=cfg)
    status = runner.wait(handle, wait_interval=0.1)
    lines = "".join(runner.log_lines(handle, "rank", 0))
    assert "sums [6] of {'rank': 1}" in lines, lines
    assert status is not None and status.state is AppState.FAILED and "code 3" in status.msg, lines
    found = re.search(r"pids (.*)", lines)
    assert found is not None
    pids = [int(pid) for pid in found[1].split()]
    until(lambda: not any(map(lives, pids)), "the end of the actors")


@pytest.mark.slow
@pytest.mark.nightly("up to 25 s of processor time; other actors are beside ranks every time")
@pytest.mark.parametrize("shape", ["1x1", "2x2"])
def test_the_example_trains_and_evaluates(runner: Runner, shape: str) -> None:
    """By forks of an interpreter that has imported torch, as by default."""
    words = ["-j", shape, "--env", "OMP_NUM_THREADS=1", str(EXAMPLE), "--epochs", "4"]
    handle = runner.run_component("monarch.spmd", words, "monarch_local", cfg={"grace": 5})
    status = runner.wait(handle, wait_interval=0.2)
    lines = "".join(runner.log_lines(handle, "actorsbesideranks", 0))
    assert status is not None and status.state is AppState.SUCCEEDED, lines
    hosts, nproc = map(int, shape.split("x"))
    assert f"{hosts * nproc} ranks train, {hosts} evaluator" in lines and "/tmp" not in lines
    assert re.search(r"accuracy  \S+  .*% to .*% of 360 test images", lines), lines


JOB = """
import os, sys
from torchx_monarch import SPMDJob, serve
from torchx_monarch.exceptions import ClientError
from monarch.actor import Actor
from monarch.job import JobTrait, job_load

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
procs = state.workers.spawn_procs()
procs.initialized.get()
job.kill()
assert not job.active and not again.can_run(job)
for use in (state.workers.spawn_procs, state.workers.stop, lambda: procs.spawn("actor", Actor)):
    try:
        use().get()
        raise AssertionError(use)
    except ClientError as error:
        assert str(error) == f"{job.handle} was killed: its meshes cannot be used"
print(job.handle, other.handle, flush=True)
os._exit(0)
"""


def test_an_spmd_job_is_a_job_of_monarchs(tmp_path: Path, runner: Runner) -> None:
    program = tmp_path / "program.py"
    program.write_text("print('a run')")
    (tmp_path / "job.py").write_text(JOB)
    command = [sys.executable, "job.py", str(program)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=WITHIN, check=False)
    assert done.returncode == 0 and "monarch_log" not in done.stderr, done.stdout + done.stderr
    killed, other = done.stdout.split()
    assert runner.status(killed).state is AppState.CANCELLED
    assert torchx_monarch.SPMDJob(other).status().ready


def test_a_client_with_another_monarch_is_told(live: Callable[..., Live], tmp_path: Path) -> None:
    hosts = live()
    where = f", address={str(hosts.target.address)!r}"
    patched = f"{where})\nfrom importlib import metadata\nmetadata.version = lambda name: '0.1'\nstr("
    why = "the hosts of monarch_local://torchx/app have torchmonarch .*, and this process 0.1"
    with pytest.raises(AssertionError, match=why), client(tmp_path, hosts.job.handle, "", patched):
        pass


def test_hosts_without_monarch_say_so(live: Callable[..., Live], tmp_path: Path) -> None:
    (tmp_path / "lib" / "monarch").mkdir(parents=True)
    (tmp_path / "lib" / "monarch" / "__init__.py").write_text("raise ImportError('no monarch')")
    hosts = live(environ={"PYTHONPATH": str(tmp_path / "lib")})
    why = "host 0 has no worker loop for actors: cannot start: no monarch. Install torchmonarch on all hosts"
    where = f", address={str(hosts.target.address)!r}"
    with pytest.raises(AssertionError, match=why), client(tmp_path, hosts.job.handle, "", where):
        pass


LOST = """
import os, sys
from monarch.actor import Actor, endpoint
from torchx_monarch import SPMDJob

class Where(Actor):
    @endpoint
    def am_i(self):
        return os.getpid()

job = SPMDJob.attach("monarch_local://torchx/app", address=sys.argv[1])

def spawn():
    return job.state(cached_path=None).workers.spawn_procs().spawn("where", Where)

actors = spawn()
print("pids", *[pid for _, pid in actors.am_i.call().get(timeout=240)], flush=True)
sys.stdin.readline()
try:
    actors.slice(hosts=1).am_i.call().get(timeout=240)
except Exception as error:
    print("raised", type(error).__name__, flush=True)
print("the other", actors.slice(hosts=0).am_i.call_one().get(timeout=240), flush=True)
print("now", *[pid for _, pid in spawn().am_i.call().get(timeout=240)], flush=True)
os._exit(0)
"""
"""A client that loses host 1 once it has read a line."""

SOON = {
    "HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT": "3s",
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "3s",
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "3s",
}
"""How soon Monarch tells a client of a lost host; by itself, after 70 s."""


@pytest.mark.slow
def test_a_lost_host_takes_its_actors_and_the_next_state_has_those_that_are_left(folder: Path, tmp_path: Path) -> None:
    (folder / "steps.py").write_text(STEPS.format(go=str(tmp_path / "go")))
    conf = ("--rdzv-conf", "join_timeout=60,last_call_timeout=1")
    command = ["torchrun", "--nnodes", "1:2", "--nproc-per-node", "1", *conf, str(folder / "steps.py")]
    hosts = Hosts(folder, command, 2, ("--grace", "5", "--preload", "")).start()
    (tmp_path / "client.py").write_text(LOST)
    words = [sys.executable, str(tmp_path / "client.py"), f"unix:{folder}/r.sock"]
    with open(tmp_path / "client.err", "w") as errors:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        client = subprocess.Popen(words, text=True, env={**os.environ, **SOON}, **pipes)  # type: ignore[call-overload]
    try:
        assert client.stdin is not None and client.stdout is not None
        first = client.stdout.readline().split()[1:]
        assert len(first) == 2, (tmp_path / "client.err").read_text()
        hosts.lose(1)
        until(lambda: hosts.out().count("steps") == 2, "the next attempt")
        print(file=client.stdin, flush=True)
        lines = client.communicate(timeout=WITHIN)[0].splitlines()
        assert len(lines) == 3, (lines, (tmp_path / "client.err").read_text())
        raised, other, now = lines
        assert raised == "raised SupervisionError"
        assert other == f"the other {first[0]}"
        assert len(now.split()) == 2 and now.split()[1] not in first
        (tmp_path / "go").touch()
        assert hosts.processes[0].wait(WITHIN) == 0
        until(lambda: not any(lives(int(pid)) for pid in (*first, now.split()[1])), "the end of the actors")
    finally:
        client.kill()
        client.wait(WITHIN)
        for process in hosts.processes.values():
            process.kill()


def worker_loops(host: int) -> list[int]:
    """Processes of the worker loops of a host, and of their actors."""
    found = []
    for pid in processes.descendants(host, ""):
        with contextlib.suppress(OSError):  # it has just ended
            if lives(pid) and b"worker_loop_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def test_a_client_that_is_killed_while_it_attaches_leaves_nothing(live: Callable[..., Live]) -> None:
    hosts = live()
    host = hosts.processes[0].pid
    for _ in range(3):
        with Connection.open(hosts.target, {"type": "attach", "names": []}) as link:
            assert link.answer()["type"] == "attaching"
            until(lambda: worker_loops(host), "a worker loop that starts")
    until(lambda: not worker_loops(host), "the end of the worker loops")
    until(lambda: not [*hosts.folder.glob("*/*/worker")], "the end of their sockets")
    until(lambda: hosts.job.status().idle > 0, "an idle allocation")


def test_many_clients_have_worker_loops_of_their_own(live: Callable[..., Live]) -> None:
    """Names are of no use on one machine; the longest list is taken, and a wrong one refused."""
    hosts = live()
    for names in (None, "text", [1], [["a"]], {"a": 1}, ["a"] * 1001):
        with (
            Connection.open(hosts.target, {"type": "attach", "names": names}) as link,
            pytest.raises(RefusedError, match="names of a client are a list of at most 1000 texts"),
        ):
            link.answer()
    assert not worker_loops(hosts.processes[0].pid)
    with contextlib.ExitStack() as stack:
        greeting = {"type": "attach", "names": [f"name-{number}" for number in range(1000)]}
        links = [stack.enter_context(Connection.open(hosts.target, greeting)) for _ in range(3)]
        answers = [[link.answer(WITHIN) for _ in range(2)][1] for link in links]
        assert len({answer["hosts"][0]["address"] for answer in answers}) == 3
        garbage = stack.enter_context(socket.socket(socket.AF_UNIX))
        garbage.settimeout(WITHIN)
        garbage.connect(hosts.target.address.path)
        garbage.sendall(b"\0\xff not a greeting\n")
        assert messages.decode(garbage.recv(1 << 16))["type"] == "refused"
        assert len(worker_loops(hosts.processes[0].pid)) == 3
    until(lambda: not worker_loops(hosts.processes[0].pid), "the end of the worker loops")


def test_ctrl_c_in_the_terminal_of_a_host_ends_ranks_and_actors(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS.format(go=str(tmp_path / "go")))
    words = ["--replicas", "1", "--grace", "5", "--preload", "", "--", "torchrun", "--nproc-per-node", "1"]
    command = [sys.executable, "-m", "torchx_monarch.host", "--app", "app", "--role", "trainer", "--replica", "0"]
    environ = {
        "MONARCH_RUN_DIR": str(folder),
        "MONARCH_RENDEZVOUS": f"unix:{folder}/r.sock",
        "MONARCH_LOG_DIR": str(tmp_path),
    }
    terminal = Terminal([*command, *words, str(tmp_path / "steps.py")], tmp_path, environ)
    ended = False
    try:
        until(lambda: terminal.shows("steps"), "the ranks")
        where = f", address={'unix:' + str(folder) + '/r.sock'!r}"
        with client(tmp_path, "monarch_local://torchx/app", "sys.stdin.read()", where) as (_, found):
            assert all(map(lives, found[0][0]))
            terminal.type("\x03")
            code = terminal.wait()
            ended = True
            assert code == 130, terminal.plain
            until(lambda: not any(map(lives, found[0][0])), "the end of the actor")
    finally:
        if not ended:
            terminal.kill()


_WORKER = """
import sys
from monarch import actor

actor.enable_transport(sys.argv[1])
actor.run_worker_loop_until_shutdown(ca="trust_all_connections", address=sys.argv[2])
"""

_CLIENT = """
import os, sys
from monarch import actor
from torchx_monarch.monarch_adapter.attachment import attach

actor.unhandled_fault_hook = lambda failure: print("a fault:", failure)
actor.enable_transport(sys.argv[1])
try:
    attach("hosts", sys.argv[3:], float(sys.argv[2]))
    print("attached")
except TimeoutError:
    print("not in time")
sys.stdout.flush()
os._exit(0)
"""

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Start a program with these arguments: ``start(program, *arguments)``; its output goes to files of the folder."""
    processes: list[subprocess.Popen[bytes]] = []

    def one(program: str, *arguments: str, url: str = "", env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        url = url or f"ipc://{folder}/client{len(processes)}"
        with (folder / f"out{len(processes)}").open("wb") as out, (folder / f"err{len(processes)}").open("wb") as err:
            command = [sys.executable, "-c", program, url, *arguments]
            environ = {**os.environ, **(env or {})}
            keep_monarch_log_private(environ)
            processes.append(subprocess.Popen(command, stdout=out, stderr=err, env=environ))
        return processes[-1]

    yield one
    for process in processes:
        process.kill()
        process.wait()


def test_a_request_that_comes_back_is_sent_again(folder: Path, start: Start) -> None:
    # A worker loop with another id sends requests back, as one that cannot deliver them yet.
    start(_WORKER, f"{worker_loop.new_service_id()}@ipc://{folder}/worker")
    wanted, ready = worker_loop.new_service_id(), f"{worker_loop.new_service_id()}@ipc://{folder}/ready"
    start(_WORKER, f"{wanted}@ipc://{folder}/wanted")
    start(_WORKER, ready)
    for name in ("worker", "wanted", "ready"):
        until((folder / name).exists, f"the worker loop {name}")
    client = start(_CLIENT, "60", f"{wanted}@ipc://{folder}/worker", ready)
    until(lambda: (folder / "err3").read_text().count("undeliverable_message") > 1, "the returned requests")
    # The other worker loop lives on: Monarch would send to its successor what it has not acknowledged.
    (folder / "wanted").rename(folder / "worker")
    assert client.wait(WITHIN) == 0
    assert (folder / "out3").read_text() == "attached\n", (folder / "err3").read_text()


def test_a_request_that_comes_back_again_and_again_is_an_error(folder: Path, start: Start) -> None:
    url = f"ipc://{folder}/worker"
    start(_WORKER, f"{worker_loop.new_service_id()}@{url}")
    client = start(_CLIENT, "3", f"{worker_loop.new_service_id()}@{url}")
    assert client.wait(WITHIN) == 0
    assert (folder / "out1").read_text() == "not in time\n", (folder / "err1").read_text()
