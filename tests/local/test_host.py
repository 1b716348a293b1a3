# SPDX-License-Identifier: BSD-3-Clause
"""A host process and its ranks: exit codes, signals, logs, deaths."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.local.hosts import NO_PRELOAD, Hosts, torchrun
from tests.waits import WITHIN, until
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.system.run_dirs import MAX_RUN_DIR


def test_options_of_another_release_are_refused() -> None:
    with pytest.raises(SystemExit, match="no option --newer: install the submitter's torchx-monarch there"):
        HostSpec.from_argv(["--app", "a", "--newer", "1", "--", "python", "x"])
    with pytest.raises(SystemExit, match="torchx_monarch.host --replica .*replica_id.*: invalid literal for int"):
        HostSpec.from_argv(["--app", "a", "--replica", "${replica_id}", "--", "python", "x"])
    with pytest.raises(SystemExit, match="no option --help"):
        HostSpec.from_argv(["--help"])


def test_modules_in_the_working_folder_do_not_reach_the_host(tmp_path: Path) -> None:
    for name in ("argparse", "asyncio", "monarch", "typing"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')")
    command = [sys.executable, "-m", "torchx_monarch.host", "--newer", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1 and done.stderr.startswith("torchx_monarch.host has no option --newer:")


def test_every_host_has_its_own_file_of_filtered_lines(folder: Path, script: Callable[[str], str]) -> None:
    options = ("--log-dir", str(folder / "shared"), "--duplicate-stdout-filters", "of rank")
    hosts = Hosts(
        folder, torchrun(*options, script("print('line of rank', rank); print('x')"), nnodes=2), 2, NO_PRELOAD
    ).start()
    assert hosts.wait() == [0, 0], hosts.err()
    files = {path.name: sorted(path.read_text().splitlines()) for path in folder.glob("shared/*/attempt_0/filtered*")}
    assert files == {
        "filtered_stdout.log": ["[trainer0]:line of rank 0", "[trainer1]:line of rank 1"],
        "filtered_stdout.1.log": ["[trainer2]:line of rank 2", "[trainer3]:line of rank 3"],
    }


DAEMON = """
import os, signal, sys
def end(*_):
    print("last words", file=open(sys.argv[1], "w") if sys.argv[1:] else None, flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, end)
os.write(int(os.environ["READY"]), b"1")
while True:
    signal.pause()
"""


@pytest.mark.parametrize(
    ("ranks", "session", "has_stream"),
    [("fork", True, False), ("fork", False, True), ("fresh", True, True), ("fresh", False, False)],
)
def test_process_that_a_rank_leaves_behind_has_time_to_end(
    folder: Path, script: Callable[[str], str], ranks: str, session: bool, has_stream: bool
) -> None:
    words = folder / "words"
    path = script(f"""
        import subprocess
        reader, writer = os.pipe()
        command = [sys.executable, "-c", {DAEMON!r}, *{[] if has_stream else [str(words)]}]
        subprocess.Popen(
            command, env={{**os.environ, "READY": str(writer)}}, pass_fds=[writer], start_new_session={session},
            **{{}} if {has_stream} else dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL),
        )
        os.read(reader, 1)
    """)
    hosts = Hosts(folder, torchrun(path, nproc=1), options=("--preload", "json", "--ranks", ranks)).start()
    assert hosts.wait() == [0], hosts.err()
    assert (hosts.out() if has_stream else words.read_text()).endswith("last words\n")


def test_torch_removes_its_shared_memory(folder: Path, script: Callable[[str], str]) -> None:
    """In torch_shm_manager, a daemon that ends two seconds after the last process that has used it."""
    path = script("""
        import torch, torch.multiprocessing
        torch.multiprocessing.set_sharing_strategy("file_system")
        shared = torch.ones(1000).share_memory_()
        print(shared.untyped_storage()._share_filename_cpu_()[1].decode(), flush=True)
        os._exit(0)
    """)
    hosts = Hosts(folder, torchrun(path, nproc=1), options=("--preload", "torch")).start()
    assert hosts.wait() == [0], hosts.err()
    assert not os.path.exists(f"/dev/shm{hosts.out().strip().removeprefix('[trainer0]:')}")


def test_longest_folder_for_sockets_that_a_backend_gives(folder: Path, script: Callable[[str], str]) -> None:
    long = folder / ("x" * (MAX_RUN_DIR - len(str(folder)) - 1))
    long.mkdir()
    assert len(str(long)) == MAX_RUN_DIR
    hosts = Hosts(folder, torchrun(script("")), options=NO_PRELOAD, environ={"MONARCH_RUN_DIR": str(long)}).start()
    assert hosts.wait() == [0], hosts.err()


def sleepers(folder: Path, script: Callable[[str], str], replicas: int = 2) -> Hosts:
    path = script("print('pid', os.getpid(), flush=True)\ntime.sleep(1000)\n")
    # A process that is killed is noticed at once, one that hangs with the lease: longer than the test waits.
    options = (*NO_PRELOAD, "--lease", "1000")
    hosts = Hosts(folder, torchrun(path, nnodes=replicas), replicas=replicas, options=options).start()
    until(lambda: len(hosts.rank_pids()) == 2 * replicas, "the ranks' first output")
    # The controller must be watching: output comes a moment before it knows that the ranks run.
    until(lambda: any(event["kind"] == "output" for event in hosts.events()), "the controller's report of it")
    return hosts


@pytest.mark.parametrize("replica", [0, 1])
def test_killed_host_ends_the_job(folder: Path, script: Callable[[str], str], replica: int) -> None:
    hosts = sleepers(folder, script)
    pid = hosts.processes[replica].pid
    os.kill(pid, signal.SIGKILL)
    assert hosts.wait() == ([-9, 1] if replica == 0 else [1, -9])
    if replica == 0:
        assert f"[monarch] host 0 ({os.uname().nodename}, pid {pid}) was lost: its connection broke" in hosts.err(1)
        for path in folder.glob("h*"):  # a dead host cannot remove its sockets; its backend removes the folder
            shutil.rmtree(path)
        (folder / "r.sock").unlink()
    else:
        assert f"pid {pid}) was lost: its connection broke" in hosts.err(0).splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_to_one_host_stops_the_job(folder: Path, script: Callable[[str], str], number: signal.Signals) -> None:
    hosts = sleepers(folder, script)
    hosts.processes[1].send_signal(number)
    assert hosts.wait() == [128 + number] * 2
    said = f"host 1 was told to stop by signal {int(number)} ({number.name})"
    if number == signal.SIGTERM:
        said = "preempted or cancelled: host 1 ("
    assert said in hosts.err(0).splitlines()[-1]


def test_signals_to_handle_end_the_job_with_that_signal(folder: Path, script: Callable[[str], str]) -> None:
    path = script("""
        def stop(*_):
            os.write(1, b"saved\\n")  # print is not reentrant: that of "ready" may not have returned
            sys.exit(0)
        signal.signal(signal.SIGUSR2, stop)
        print("ready", flush=True)
        time.sleep(1000)
    """)
    hosts = Hosts(folder, torchrun("--signals-to-handle", "SIGTERM,SIGUSR2", path), options=NO_PRELOAD).start()
    until(lambda: hosts.out().count("ready") == 2, "the ranks")
    hosts.processes[0].send_signal(signal.SIGUSR2)
    assert hosts.wait() == [128 + signal.SIGUSR2]
    assert hosts.out().count("saved") == 2


@pytest.mark.parametrize(
    ("started", "reason"),
    [((0, 1), "replica 2 did not arrive within 2 s (--host-timeout, "), ((1,), "replica 0 was not reached in 2 s")],
)
def test_a_host_that_never_arrives_is_named(
    folder: Path, script: Callable[[str], str], started: tuple[int, ...], reason: str
) -> None:
    options = ("--grace", "1", "--preload", "", "--host-timeout", "2")
    hosts = Hosts(folder, torchrun(script(""), nnodes=3), replicas=3, options=options).start(*started)
    assert hosts.wait() == [1] * len(started)
    assert reason in hosts.err(started[0]).splitlines()[-1]


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (["torchrun", "nosuch.py"], 2, "can't open file"),
        (["torchrun", "--nprocs", "2", "x.py"], 2, "--nprocs"),
        (["torchrun", "--nproc-per-node", "gpu", "PROGRAM"], 1, "--nproc-per-node=gpu"),
        (["torchrun", "--numa-binding", "node", "--no-python", "true"], 1, "--numa-binding=node: local rank 0 has no"),
        (["torchrun", "--log-dir", "/proc/self/status/logs", "PROGRAM"], 1, "cannot write the ranks' logs"),
    ],
)
def test_what_cannot_run_says_so_in_the_last_line(
    folder: Path, script: Callable[[str], str], command: list[str], code: int, words: str
) -> None:
    command = [script("") if word == "PROGRAM" else word for word in command]
    hosts = Hosts(folder, command, options=NO_PRELOAD).start()
    assert hosts.wait() == [code]
    assert words in hosts.err().splitlines()[-1]


def test_failure_to_start_on_another_host_is_reported_by_replica_0(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "only_here.py"
    path.write_text("")
    command = torchrun(str(path), nnodes=2)
    hosts = Hosts(folder, command, replicas=2, options=NO_PRELOAD).start(0)
    until(lambda: (folder / "r.sock").exists(), "replica 0")
    path.unlink()
    hosts.start(1)
    assert hosts.wait() == [2, 2]
    last = hosts.err(0).splitlines()[-1]
    assert "host 1 (" in last and "cannot start: can't open file" in last


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "abc"),
        ("MONARCH_RESTART", "-1"),
        ("MONARCH_RUN_DIR", "/no/such/folder"),
        ("MONARCH_RENDEZVOUS", "pigeon:1"),
    ],
)
def test_bad_variables_are_named(folder: Path, script: Callable[[str], str], variable: str, value: str) -> None:
    command = torchrun(script(""), nnodes=2)
    hosts = Hosts(folder, command, replicas=2, options=NO_PRELOAD, environ={variable: value}).start()
    assert set(hosts.wait()) <= {1, 2}
    assert "internal error" not in hosts.err(0) + hosts.err(1)
    assert value in hosts.err().splitlines()[-1]


def test_many_ranks_with_few_open_files(folder: Path, script: Callable[[str], str]) -> None:
    path = script("import resource; print('files', resource.getrlimit(resource.RLIMIT_NOFILE)[0])")
    limited = ("sh", "-c", 'ulimit -Sn 64; exec "$@"', "sh")
    hosts = Hosts(folder, torchrun(path, nproc=40), options=NO_PRELOAD, wrapper=limited).start()
    assert hosts.wait() == [0]
    assert hosts.out().count("files 64\n") == 40


def test_the_limit_of_too_few_open_files_is_named(folder: Path, script: Callable[[str], str]) -> None:
    limited = ("sh", "-c", 'ulimit -Sn 30; exec "$@"', "sh")
    hosts = Hosts(folder, torchrun(script(""), nproc=40), options=NO_PRELOAD, wrapper=limited).start()
    assert hosts.wait() == [1]
    assert "Too many open files (RLIMIT_NOFILE is 30: ulimit -n)" in hosts.err().splitlines()[-1]


def test_no_tcp_port_is_opened_but_the_store_of_rank_0(folder: Path, script: Callable[[str], str]) -> None:
    path = script("print('pid', os.getpid(), os.environ['MASTER_PORT'], flush=True)\ntime.sleep(1000)")
    hosts = Hosts(folder, torchrun(path)).start()
    until(lambda: len(hosts.rank_pids()) == 2, "the ranks")
    port = hosts.out().split()[2]
    host = psutil.Process(hosts.processes[0].pid)
    connections = [
        connection
        for process in [host, *host.children(recursive=True)]
        for connection in process.net_connections("tcp")
    ]
    assert [connection.laddr for connection in connections if connection.status == psutil.CONN_LISTEN] == [
        ("127.0.0.1", int(port))
    ]
    hosts.processes[0].terminate()
    assert hosts.wait() == [143]


def test_runs_as_pid_1(folder: Path, script: Callable[[str], str]) -> None:
    path = script("""
        import subprocess
        subprocess.run(["sh", "-c", "sleep 0.2 &"])  # an orphan, which PID 1 has to reap
        print("ppid", os.getppid(), flush=True)
        time.sleep(1000)
    """)
    unshare = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    if subprocess.run([*unshare, "true"], capture_output=True, timeout=WITHIN).returncode:
        pytest.skip("this machine does not allow new pid namespaces")
    hosts = Hosts(folder, torchrun(path, nproc=1), options=NO_PRELOAD, wrapper=unshare).start()
    until(lambda: "ppid 1\n" in hosts.out(), "the rank, a child of PID 1")
    [inside] = psutil.Process(hosts.processes[0].pid).children()
    inside.terminate()  # ignored by default for PID 1
    assert hosts.wait() == [143]
