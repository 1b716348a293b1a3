# SPDX-License-Identifier: BSD-3-Clause
"""Runs on hosts that wait for them, one after the other."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError  # the built-in one since Python 3.11
from pathlib import Path
from typing import Any

import psutil
import pytest

import torchx_monarch
from tests.local.live import Live
from tests.ports import free_port
from tests.waits import WITHIN, until
from torchx_monarch.client.connection import Connection
from torchx_monarch.client.run_options import RunOptions, run_request
from torchx_monarch.exceptions import AllocationError, RefusedError, SPMDError, UnreachableError


def texts(result: Any) -> dict[int, str]:
    return {rank: output.stdout for rank, output in result.output.items()}


@pytest.mark.parametrize("preload", ["", "json,multiprocessing.process"])
def test_relative_paths_for_python_are_relative_to_the_runs_folder(
    preload: str, live: Callable[..., Live], tmp_path: Path
) -> None:
    there = tmp_path / "there"
    (there / "lib").mkdir(parents=True)
    (there / "lib" / "own.py").touch()
    (there / "prog.py").write_text("import os, sys, own; print(own.__file__, os.environ['PYTHONPATH'], sys.executable)")
    (there / "py").symlink_to(sys.executable)
    hosts = live("torchrun", "--nproc-per-node", "1", "prog.py", options=("--grace", "5", "--preload", preload))
    env = {"PYTHONPATH": "lib", "PYTHON_EXEC": "./py"}
    said = texts(hosts.run("prog.py", env=env, cwd=str(there)))[0].split()
    assert said[:2] == [str(there / "lib" / "own.py"), "lib"]
    assert os.path.samefile(there / said[2], there / "py")
    # By this, multiprocessing replaces the entry '' of sys.path in children that it spawns.
    (there / "spawns.py").write_text("import multiprocessing.process as mp; print(mp.ORIGINAL_DIR)")
    assert texts(hosts.run("spawns.py", cwd=str(there))) == {0: f"{there}\n"}


TAKES_PORT = """
import os, socket
port = int(os.environ["MASTER_PORT"])
server = socket.create_server(("127.0.0.1", port))
client = socket.create_connection(("127.0.0.1", port))
server.accept()[0].close()
print(client.recv(1).decode() + str(port))
"""


def test_each_run_gets_what_it_is_given_and_nothing_of_another(
    live: Callable[..., Live], script: Callable[[str], str], tmp_path: Path
) -> None:
    path = script("print(sys.argv[1:], os.getcwd(), os.environ.get('LR'), sys.path[0], os.environ['WORLD_SIZE'])")
    hosts = live("torchrun", "--nproc-per-node", "2", path, "--held")
    here, there = os.getcwd(), str(tmp_path / "there")
    os.mkdir(there)

    def said(args: list[str], cwd: str, lr: str | None, world: int) -> dict[int, str]:
        return dict.fromkeys(range(world), f"{args} {cwd} {lr} {tmp_path} {world}\n")

    result = hosts.run()
    assert texts(result) == said(["--held"], here, None, 2)
    assert (result.run, result.exit_code, result.exit_codes, result.attempts) == (1, 0, {0: 0, 1: 0}, 1)
    assert texts(hosts.run(path, "-x", env={"LR": "0.1"}, cwd=there)) == said(["-x"], there, "0.1", 2)
    assert texts(hosts.run()) == said(["--held"], here, None, 2)
    assert texts(hosts.run(nproc=3)) == said(["--held"], here, None, 3)
    # What a zygote has read already cannot be changed: this run gets another.
    early = tmp_path / "early.py"
    early.write_text("import os, sys\nprint(os.environ['OMP_NUM_THREADS'], sys.flags.optimize)")
    env = {"OMP_NUM_THREADS": "7", "PYTHONOPTIMIZE": "1"}
    assert texts(hosts.run(str(early), env=env)) == dict.fromkeys((0, 1), "7 1\n")
    assert texts(hosts.run(str(early))) == dict.fromkeys((0, 1), "1 0\n")
    source = "import sys, traceback; print(sys.argv, traceback.extract_stack()[-1].line)"
    alone = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert texts(hosts.run("python", "-c", source)) == {0: alone.stdout}  # from Python 3.13 on, with the line
    # Of torchrun's options, some are the allocation's.
    phases: list[str] = []
    unused = ["--rdzv-conf", "join_timeout=5,read_timeout=6", "--signals-to-handle", "SIGUSR1"]
    meet = "import os; print(os.environ['MASTER_ADDR'], os.environ['TORCHELASTIC_SIGNALS_TO_HANDLE'])"
    (tmp_path / "meet.py").write_text(meet)
    words = ["torchrun", "--local-addr", "127.0.0.2", *unused, str(tmp_path / "meet.py")]
    assert texts(hosts.run(*words, on_phase=phases.append)) == {0: "127.0.0.2 SIGUSR1\n"}
    for said_once in (
        "--rdzv-conf join_timeout, read_timeout has no",
        "--signals-to-handle SIGUSR1 has no effect on the",
    ):
        assert [said_once in line for line in phases].count(True) == hosts.err().count(said_once) == 1
    # A named port is free again for the next run, also with a connection that the last one has closed.
    (tmp_path / "port.py").write_text(TAKES_PORT)
    port = str(free_port())
    for _ in range(2):
        assert texts(hosts.run("torchrun", "--master-port", port, str(tmp_path / "port.py"))) == {0: f"{port}\n"}
    assert texts(hosts.run()) == said(["--held"], here, None, 2)
    logs = hosts.logs(0)
    assert (logs / "run_2/attempt_0/1/stdout.log").read_text() == said(["-x"], there, "0.1", 2)[1]
    assert [run["state"] for run in hosts.job.runs()] == ["succeeded"] * 11
    assert list(hosts.job.logs(rank=1, run=1)) == [said(["--held"], here, None, 2)[1].rstrip()]
    assert hosts.end() == [0]
    assert "[monarch] SUCCEEDED: released by its client" in hosts.err()


def test_a_run_gets_as_many_arguments_as_a_command_may_have(
    live: Callable[..., Live], script: Callable[[str], str]
) -> None:
    path = script("print(len(sys.argv), sum(map(len, sys.argv[1:])), len(os.environ['LONG']))")
    hosts = live("torchrun", "--nnodes", "2", "--nproc-per-node", "1", path, replicas=2)
    result = hosts.run(path, *[f"{number:0300}" for number in range(5000)], env={"LONG": "é" * 60_000})
    assert texts(result) == dict.fromkeys((0, 1), "5001 1500000 60000\n"), result
    assert len(hosts.job.runs()[0]["command"]) < 600
    assert hosts.end() == [0, 0]


def test_a_failure_says_who_began_it_and_leaves_the_hosts_to_the_next_run(
    live: Callable[..., Live], script: Callable[[str], str]
) -> None:
    path = script("""
        if sys.argv[1:] == ["fail"] and rank == 1:
            raise ValueError("boom")
        if sys.argv[1:]:
            time.sleep(1000)
        print("well")
    """)
    hosts = live("torchrun", "--nproc-per-node", "2", path)
    for _ in range(2):
        with pytest.raises(SPMDError) as caught:
            hosts.job.run_spmd([path, "fail"], output="none")
        error = pickle.loads(pickle.dumps(caught.value))
        assert str(error) == str(caught.value)
        assert error.root_cause.rank == 1 and error.root_cause.message == "ValueError: boom"
        assert error.failed_ranks == [1] and error.result.exit_code == 1 and error.result.cause == 1
        assert "ValueError: boom" in error.tracebacks[1]
        assert "ValueError: boom" in Path(error.log_paths[1]).read_text()
        assert error.result.ranks[1].seconds > 0
        assert texts(hosts.run()) == {0: "well\n", 1: "well\n"}
    result = hosts.run(path, "wait", timeout=1)
    assert (result.exit_code, result.stopped, result.cause) == (124, True, None)
    assert result.reason == f"run {result.run} was ended by its timeout of 1 s"
    assert hosts.run("nosuch.py").exit_code == 2
    assert "can't open file" in hosts.run("nosuch.py").reason
    reason = hosts.run("torchrun", "--nnodes", "3", path).reason
    assert "--nnodes=3 does not agree with the allocation's 1 host. Use --nnodes=1, or take other hosts" in reason
    assert "role" not in reason
    assert hosts.run().exit_code == 0
    assert hosts.end() == [0]


@pytest.mark.parametrize("preload", ["", "json"])
def test_a_module_that_is_edited_twice_within_a_second(
    preload: str, live: Callable[..., Live], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python takes bytecode as that of a source file if its size and the whole second of its mtime are the same."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    (tmp_path / "prog.py").write_text("""if True:
        import os, pathlib, sys, edited
        print(edited.value, flush=True)
        if edited.value == 2:
            pathlib.Path("edited.py").write_text("value = 3")
            os.utime("edited.py", (1, 1))
            sys.exit(1)
    """)
    hosts = live(options=("--grace", "5", "--preload", preload))
    words = ("torchrun", "--nproc-per-node", "1", "--max-restarts", "1", "prog.py")
    for value, printed in ((1, "1\n"), (2, "2\n3\n"), (4, "4\n")):
        (tmp_path / "edited.py").write_text(f"value = {value}")
        os.utime(tmp_path / "edited.py", (1, 1))
        assert texts(hosts.run(*words, cwd=str(tmp_path)))[0] == printed


def test_one_at_a_time_unless_asked_to_wait(
    live: Callable[..., Live], script: Callable[[str], str], tmp_path: Path
) -> None:
    path = script(f"""
        print("begun", flush=True)
        while not os.path.exists({str(tmp_path / "go")!r}):
            time.sleep(0.05)
    """)
    never = ("--grace", "1000", "--preload", "")
    hosts = live("torchrun", "--nproc-per-node", "2", path, options=never)
    first = hosts.job.run_spmd_async(output="store")
    with pytest.raises(RefusedError, match=r"run 1 by \S+ \((queued|running) for "):
        hosts.job.run_spmd()
    second = hosts.job.run_spmd_async([path, "2"], queue=True, output="store")
    third = hosts.job.run_spmd_async([path, "3"], queue=True)
    assert third.cancel() and isinstance(third.exception(WITHIN), SPMDError) and third.cancelled()
    assert [run["state"] for run in hosts.job.runs()] == ["stopped", "running", "queued"]
    assert not first.done() and not second.done()
    with pytest.raises(FutureTimeoutError):
        first.result(0.1)
    (tmp_path / "go").touch()
    assert first.result(WITHIN).exit_code == 0 and second.result(WITHIN).exit_code == 0
    assert not first.cancel()
    (tmp_path / "go").unlink()
    # Stopped while it runs; and killed, where the ranks ignore that.
    handle = hosts.job.run_spmd_async(output="none")
    until(lambda: list(hosts.job.logs()) == ["begun"] * 2, "both ranks")
    assert handle.cancel() and handle.cancelled() is handle.done()
    error = handle.exception(WITHIN)
    assert isinstance(error, SPMDError) and error.result.exit_code == 143 and error.result.stopped
    stubborn = ["-c", "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(1000)"]
    handle = hosts.job.run_spmd_async(["python", *stubborn], output="none", check=False)
    until(lambda: list(hosts.job.logs()) == ["1"], "the rank")
    assert handle.cancel() and handle.cancel(kill=True)
    assert handle.result(WITHIN).stopped
    (tmp_path / "go").touch()
    assert hosts.run().exit_code == 0
    assert hosts.end() == [0]


def test_a_run_outlives_its_client_and_is_found_again(
    live: Callable[..., Live], script: Callable[[str], str], tmp_path: Path
) -> None:
    path = script(f"""
        print("begun", rank, flush=True)
        while not os.path.exists({str(tmp_path / "go")!r}):
            time.sleep(0.05)
        print("over", rank)
        open(f"{tmp_path}/over-{{rank}}", "w").close()
        while not all(os.path.exists(f"{tmp_path}/over-{{each}}") for each in (0, 1)):
            time.sleep(0.01)
        sys.exit(3)  # the first that does has the other one stopped
    """)
    hosts = live("torchrun", "--nproc-per-node", "2", path)
    with Connection.open(hosts.target, run_request(None, RunOptions()).to_message()) as link:
        assert link.receive() == {"type": "accepted", "run": 1, "before": 0}
    other = torchx_monarch.SPMDJob.attach(hosts.job.handle, address=str(hosts.target.address))
    handle = other.follow(output="store", check=False)
    lines = other.logs(rank=0, follow=True)
    assert next(lines) == "begun 0"
    (tmp_path / "go").touch()
    assert handle.result(WITHIN).exit_code == 3
    assert texts(handle.result()) == {rank: f"begun {rank}\nover {rank}\n" for rank in (0, 1)}
    assert list(lines) == ["over 0"]
    assert texts(other.follow(1, output="store", check=False).result(WITHIN)) == texts(handle.result())
    with pytest.raises(RefusedError, match="run 7 is not known here; the last was 1"):
        other.follow(7)
    assert hosts.end() == [0]
    with pytest.raises(UnreachableError):
        other.follow(1)


def test_logs_of_a_rank_that_is_not_there(live: Callable[..., Live], script: Callable[[str], str]) -> None:
    path = script("print('rank', rank, flush=True)\ntime.sleep(1000 if sys.argv[1:] else 0)")
    hosts = live("torchrun", "--nproc-per-node", "2", path, "wait")
    handle = hosts.job.run_spmd_async(output="none")
    until(lambda: len(list(hosts.job.logs())) == 2, "the ranks")
    assert list(hosts.job.logs(1)) == ["rank 1"]
    for rank in (2, 99, -1):
        for follow in (False, True):
            with pytest.raises(RefusedError, match=f"run 1 has no rank {rank}; it has ranks 0 to 1"):
                list(hosts.job.logs(rank, follow=follow))
    with pytest.raises(RefusedError, match="rank is '1', not int"):
        list(hosts.job.logs("1"))  # type: ignore[arg-type]
    # Of a run that waits for another it is not known yet.
    hosts.job.run_spmd_async([path], nproc=1, output="none", queue=True)
    assert list(hosts.job.logs(1, run=2)) == []
    handle.cancel()
    assert list(hosts.job.logs(0, follow=True, run=2)) == ["rank 0"]
    with pytest.raises(RefusedError, match="run 2 has no rank 1; it has rank 0 alone"):
        list(hosts.job.logs(1, run=2))


def test_ends_when_nobody_comes(live: Callable[..., Live], script: Callable[[str], str]) -> None:
    # On a busy machine, the client has that long to come.
    path = script("time.sleep(9)")
    hosts = live("torchrun", "--nproc-per-node", "1", path, idle_timeout=8)
    assert hosts.run().exit_code == 0  # longer than that
    assert hosts.wait() == [0]
    assert "SUCCEEDED: no run and no client for 8 s: the hosts end" in hosts.err()


def test_two_hosts_are_one_allocation_and_all_output_comes(
    live: Callable[..., Live], script: Callable[[str], str]
) -> None:
    path = script("""
        for number in range(2000):
            print(rank, number, "x" * 50)
        print("\\U0001F600" * 9000, flush=True)  # twelve bytes each in JSON
        sys.stdout.buffer.write(b"\\xff\\n")
        print("last", rank, file=sys.stderr)
    """)
    hosts = live("torchrun", "--nnodes", "2", "--nproc-per-node", "2", path, replicas=2)
    assert hosts.job.status().hosts == dict.fromkeys((0, 1), os.uname().nodename)
    for words in ((), ("torchrun", "--nproc-per-node", "2", path)):  # a run is for all hosts
        result = hosts.run(*words)
        assert result.exit_codes == dict.fromkeys(range(4), 0), result.reason
        for rank, output in result.output.items():
            *lines, smiles, last = output.stdout.splitlines()
            assert lines == [f"{rank} {n} {'x' * 50}" for n in range(2000)]
            assert smiles == "\U0001f600" * 9000 and last == "\udcff"
            assert output.stderr == f"last {rank}\n"
    assert hosts.end() == [0, 0]


@pytest.mark.parametrize("during", ["a run", "no run"])
def test_a_lost_host_is_replaced(live: Callable[..., Live], script: Callable[[str], str], during: str) -> None:
    path = script("""
        print("attempt", attempt, flush=True)
        if sys.argv[1:] and attempt == 0:
            time.sleep(1000)
    """)
    options = ("--grace", "5", "--preload", "", "--replacements", "2")
    hosts = live("torchrun", "--nnodes", "2", "--nproc-per-node", "1", path, replicas=2, options=options)
    assert hosts.run().exit_code == 0
    handle = None
    if during == "a run":
        handle = hosts.job.run_spmd_async([path, "wait"], output="store")
        until(lambda: len(list(hosts.job.logs())) == 2, "both ranks")
    hosts.lose(1)
    hosts.start(1)
    if handle is not None:
        assert {rank: text.splitlines()[-1] for rank, text in texts(handle.result(WITHIN)).items()} == {
            0: "attempt 1",
            1: "attempt 1",
        }
    until(lambda: "replica 1 is to be replaced" in hosts.err(), "the loss")
    hosts.wait_mesh()
    assert texts(hosts.run()) == {0: "attempt 0\n", 1: "attempt 0\n"}
    assert hosts.end() == [0, 0]


def test_a_lost_first_host_takes_its_run_along_and_not_the_allocation(
    live: Callable[..., Live], script: Callable[[str], str]
) -> None:
    path = script("print('begun', flush=True)\ntime.sleep(1000 if sys.argv[1:] else 0)")
    options = ("--grace", "5", "--preload", "", "--replacements", "1")
    hosts = live("torchrun", "--nnodes", "2", "--nproc-per-node", "1", path, replicas=2, options=options)
    handle = hosts.job.run_spmd_async([path, "wait"], output="store")
    until(lambda: list(hosts.job.logs()) == ["begun"] * 2, "both ranks")
    hosts.processes[0].kill()
    hosts.processes[0].wait()
    hosts.start(0)
    error = handle.exception(WITHIN)
    assert isinstance(error, UnreachableError) and "run 1 lost its connection: run 1 is not known here" in str(error)
    hosts.wait_mesh()
    result = hosts.run()
    assert (result.run, texts(result)) == (2, {0: "begun\n", 1: "begun\n"})
    assert hosts.end() == [0, 0]


def test_the_end_of_the_hosts_ends_the_wait_for_a_run(live: Callable[..., Live], script: Callable[[str], str]) -> None:
    path = script("print('begun', flush=True)\ntime.sleep(1000)")
    hosts = live("torchrun", "--nproc-per-node", "1", path)
    handle = hosts.job.run_spmd_async(output="none")
    until(lambda: list(hosts.job.logs()) == ["begun"], "the rank")
    hosts.processes[0].terminate()
    error = handle.exception(WITHIN)
    assert isinstance(error, SPMDError) and "the hosts have ended: preempted" in str(error)
    assert hosts.wait() == [143]


WAYS = {
    # How a run fails, and what its exit code is.
    "exit": ("sys.exit(3 * (rank == 1))", 3),
    "raise": ("if rank: raise ValueError('boom')", 1),
    "kill": ("os.kill(os.getpid(), signal.SIGKILL)", 137),
    "segfault": ("import ctypes; rank and ctypes.string_at(0)", 139),
    "_exit": ("os._exit(7)", 7),
    "syntax": ("print(", 1),
    "stray": ("import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True); sys.exit(4)", 4),
    "threads": ("import threading; threading.Thread(target=time.sleep, args=(1000,)).start(); os.abort()", 134),
    "missing": ("", 2),
    "timeout": ("time.sleep(1000)", 124),
}


def _used(process: psutil.Process) -> tuple[int, int, int]:
    children = [child for child in process.children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    return len(children), process.num_fds(), process.num_threads()


def test_many_runs_leave_no_trace(live: Callable[..., Live], script: Callable[[str], str], tmp_path: Path) -> None:
    # The whole hundred: MONARCH_TEST_RUNS=100, as in `make soak`.
    count = int(os.environ.get("MONARCH_TEST_RUNS", "30"))
    good = script("print(rank, sys.argv[1])\nimport torchx_monarch; torchx_monarch.progress(5)")
    hosts = live("torchrun", "--nproc-per-node", "2", good, "0", idle_timeout=120)
    head = Path(good).read_text().partition("\n")[0] + "\n" + Path(good).read_text().splitlines()[1] + "\n"
    process = psutil.Process(hosts.processes[0].pid)
    used: list[tuple[int, int, int]] = []
    memory = []
    ways = list(WAYS)

    def stays_within() -> bool:
        return all(now <= most for now, most in zip(_used(process), used[0], strict=True))

    for number in range(count):
        if number % 10 == 9 or number < len(ways):
            way = ways[(number // 10 if number >= len(ways) else number) % len(ways)]
            bad = tmp_path / f"{way}.py"
            if way != "missing":
                bad.write_text(head + WAYS[way][0] + "\n")
            result = hosts.run(str(bad), timeout=1 if way == "timeout" else 60)
            assert result.exit_code == WAYS[way][1], (way, result.reason)
        else:
            result = hosts.run(good, str(number))
            assert result.exit_code == 0, result.reason
            assert texts(result) == {rank: f"{rank} {number}\n" for rank in (0, 1)}
        assert result.run == number + 1
        if number % 10 == 8 and number >= 10:
            until(lambda: hosts.job.status().warm, "the zygote")
            if not used:
                children, files, threads = _used(process)
                # asyncio starts the threads of its executor one by one, when all before are busy.
                used.append((children, files, threads + min(32, (os.cpu_count() or 1) + 4)))
            # A connection that has just ended may not be closed at their end yet.
            until(stays_within, f"no more than {used[0]} children, files and threads")
            memory.append(process.memory_info().rss)
    assert memory[-1] - memory[0] < 3e6, memory
    assert hosts.end() == [0]


def test_ended_before_torch_is_imported(live: Callable[..., Live], script: Callable[[str], str]) -> None:
    # What the zygote was asked for the first run must not be answered to the second.
    path = script("""
        if sys.argv[1:]:
            time.sleep(1000)
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()  # gloo of one rank fails when the other destroys the group before both have connected
        dist.destroy_process_group()
        print("formed", os.environ["TORCHELASTIC_USE_AGENT_STORE"])
    """)
    options = ("--grace", "5", "--preload", "torch")
    hosts = live("torchrun", "--nproc-per-node", "2", path, options=options)
    process = psutil.Process(hosts.processes[0].pid)
    assert hosts.run(path, "wait", timeout=0.2).exit_code == 124
    result = hosts.run()
    assert result.exit_code == 0, (result.reason, result.output)
    assert texts(result) == dict.fromkeys((0, 1), "formed True\n")

    def zygotes() -> list[int]:
        found = []
        for child in process.children():
            with contextlib.suppress(psutil.NoSuchProcess):  # what a run has left ends
                found += [child.pid] * ("torchx-monarch zygote" in " ".join(child.cmdline()))
        return found

    before = zygotes()
    assert texts(hosts.run()) == dict.fromkeys((0, 1), "formed True\n")
    assert len(before) == 1 and zygotes() == before
    assert hosts.end() == [0]


def test_not_there(folder: Path) -> None:
    job = torchx_monarch.SPMDJob("monarch_local://torchx/nosuch")
    with pytest.raises(UnreachableError, match="monarch_local://torchx/nosuch is not known in "):
        torchx_monarch.SPMDJob.attach(job.handle)
    with pytest.raises(AllocationError, match="monarch_local://torchx/nosuch does not exist"):
        job.run_spmd()
    with pytest.raises(AllocationError, match="does not exist"):
        job.wait_ready(5)
    with pytest.raises(UnreachableError, match="'nowhere' is not of the form|nowhere"):
        torchx_monarch.SPMDJob("monarch_local://torchx/nosuch", address="nowhere").runs()
    assert job.status().state == "UNKNOWN"
    late = torchx_monarch.SPMDJob(job.handle, address=f"unix:{folder}/nosuch.sock", start_timeout=0.0)
    with pytest.raises(AllocationError, match=r"is not ready after 0 s: waiting for an answer at .*: .*No such file"):
        late.run_spmd()
