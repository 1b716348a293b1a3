# SPDX-License-Identifier: BSD-3-Clause
"""Ranks that are forks of a host's zygote: what they share, what they do not, and when they are not forks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.local.hosts import Hosts, torchrun
from tests.waits import WITHIN, until

FORKED = ("--grace", "5", "--preload", "json,random,tempfile,uuid,multiprocessing,concurrent.futures")


def said(hosts: Hosts) -> dict[int, str]:
    """What each rank has printed."""
    lines: dict[int, str] = {}
    for number, text in re.findall(r"^\[\D*(\d+)\]:(.*)$", hosts.out(), re.MULTILINE):
        lines[int(number)] = lines.get(int(number), "") + text
    return lines


def test_a_rank_is_a_process_like_any_other(folder: Path, script: Callable[[str], str]) -> None:
    path = script("""
        import gc, resource, threading
        ignored = next(line for line in open("/proc/self/status") if line.startswith("SigIgn")).split()[1]
        ignored = hex(int(ignored, 16) & 0x7FFFFFFF)  # real-time signals are what the caller has left
        print(os.getppid() == int(os.environ["HOST"]) or os.getppid(), os.getsid(0) == os.getpid(), ignored,
              gc.isenabled(), threading.active_count(), threading.main_thread().native_id == os.getpid(),
              sorted(map(int, os.listdir("/proc/self/fd"))),
              signal.getsignal(signal.SIGINT) is signal.default_int_handler,
              signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, oct(os.umask(0)), sep=";", flush=True)
    """)
    hosts = Hosts(folder, torchrun(path, nproc=1), options=FORKED, environ={"HOST": "0"}).start()
    assert hosts.wait() == [0], hosts.err()
    host, *rest = said(hosts)[0].split(";")
    assert int(host) == hosts.processes[0].pid
    mask = os.umask(0)
    os.umask(mask)
    # Python ignores SIGPIPE and SIGXFSZ; the fourth descriptor is that of the listing, the last one that for stacks.
    assert rest == ["True", "0x1001000", "True", "1", "True", "[0, 1, 2, 3, 1023]", "True", "True", oct(mask)]


def test_a_process_listing_shows_the_command_however_long(folder: Path, script: Callable[[str], str]) -> None:
    path, long = script("print(*open('/proc/self/cmdline').read().split(chr(0))[1:], sep='|', flush=True)"), 9000 * "x"
    hosts = Hosts(folder, [*torchrun(path), "--lr", "1 2", long], options=FORKED).start()
    assert hosts.wait() == [0], hosts.err()
    assert said(hosts) == dict.fromkeys((0, 1), f"-u|{path}|--lr|1 2|{long}|")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_the_processor_to_which_openmp_binds_the_zygote_is_no_choice_of_the_program(
    folder: Path, script: Callable[[str], str]
) -> None:
    path = script("import torch\nprint(torch.get_num_threads(), len(os.sched_getaffinity(0)), flush=True)")
    environ = {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores", "OMP_NUM_THREADS": "2"}
    hosts = Hosts(folder, torchrun(path, nproc=1), options=("--preload", "torch"), environ=environ).start()
    assert hosts.wait() == [0], hosts.err()
    assert said(hosts) == {0: "2 1"}  # as under torchrun


UNSAFE = {
    "a thread": ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), name='mine', daemon=True)"
                 ".start()", "mod runs a thread (mine)"),
    "a file": ("import sys\nfile = open(__file__)", "mod keeps "),
    "a process": ("import subprocess\nchild = subprocess.Popen(['sleep', '60'])", "mod runs a process ("),
    "memory": ("import multiprocessing\nlock = multiprocessing.Lock()",
               "mod makes memory that processes share (/dev/shm/sem."),
    "a seed of random's": ("import random\nrandom.seed(1)", "mod seeds or uses a random generator"),
    "a seed of numpy's": ("import numpy\nnumpy.random.seed(1)", "mod seeds or uses a random generator"),
    "a seed of torch's": ("import torch\ntorch.manual_seed(1)", "mod seeds or uses a random generator"),
    "a random number of torch's": ("import torch\nnoise = torch.rand(2)", "mod seeds or uses a random generator"),
    "a tracer": ("import sys\nsys.setprofile(lambda *_: None)", "a tracer or profiler is active"),
}  # fmt: skip


@pytest.mark.parametrize("what", UNSAFE)
def test_ranks_are_no_forks_of_an_interpreter_with(
    folder: Path, script: Callable[[str], str], tmp_path: Path, what: str
) -> None:
    (tmp_path / "mod.py").write_text(UNSAFE[what][0])
    path = script("print('PreloadedModules' in str(sys.meta_path), flush=True)")
    hosts = Hosts(folder, torchrun(path), options=("--preload", "mod")).start()
    assert hosts.wait() == [0], hosts.err()
    assert said(hosts) == {0: "False", 1: "False"}
    [line] = [line for line in hosts.err().splitlines() if "the ranks are not forks of one interpreter: " in line]
    assert UNSAFE[what][1] in line


@pytest.mark.parametrize("ranks", ["fork", "fresh"])
def test_fresh_ranks_import_for_themselves(
    folder: Path, script: Callable[[str], str], tmp_path: Path, ranks: str
) -> None:
    (tmp_path / "mod.py").write_text("")
    path = script("print('PreloadedModules' in str(sys.meta_path), flush=True)")
    hosts = Hosts(folder, torchrun(path), options=("--preload", "mod", "--ranks", ranks)).start()
    assert hosts.wait() == [0], hosts.err()
    assert said(hosts) == dict.fromkeys((0, 1), str(ranks == "fork"))


def test_a_module_that_ends_the_zygote(folder: Path, script: Callable[[str], str], tmp_path: Path) -> None:
    (tmp_path / "mod.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    path = script("print('PreloadedModules' in str(sys.meta_path), flush=True)")
    hosts = Hosts(folder, torchrun(path), options=("--preload", "mod")).start()
    assert hosts.wait() == [0], hosts.err()
    assert said(hosts) == {0: "False", 1: "False"}
    assert "was killed by signal 11 (SIGSEGV) while it imported mod; the ranks import for themselves" in hosts.err()


def test_a_killed_zygote_is_replaced(folder: Path, script: Callable[[str], str]) -> None:
    path = script("""
        import pathlib
        if attempt == 0:
            for pid in pathlib.Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split():
                if "torchx-monarch zygote" in pathlib.Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(int(pid), signal.SIGKILL)
            sys.exit(1)
        print("attempt", attempt, "uuid" in sys.modules, flush=True)
    """)
    hosts = Hosts(folder, torchrun(path, nproc=1, restarts=1), options=FORKED).start()
    assert hosts.wait() == [0], hosts.err()
    assert said(hosts) == {0: "attempt 1 True"}


def test_a_stop_while_modules_are_imported(folder: Path, script: Callable[[str], str], tmp_path: Path) -> None:
    (tmp_path / "mod.py").write_text(f"import time\nopen({str(tmp_path / 'importing')!r}, 'w')\ntime.sleep(1000)")
    path = script(f"open({str(tmp_path / 'ran')!r}, 'w')")
    hosts = Hosts(folder, torchrun(path), options=("--grace", "1", "--preload", "mod")).start()
    until((tmp_path / "importing").exists, "the import")
    hosts.processes[0].send_signal(signal.SIGTERM)
    assert hosts.wait() != [0]
    assert not (tmp_path / "ran").exists()


ORPHAN = """
import json, os, socket, subprocess, sys
from torchx_monarch.host.ranks import zygote_process
from torchx_monarch.system import processes
processes.become_subreaper()
ours, theirs = socket.socketpair()
words = [sys.executable, "-I", "-S", zygote_process._ZYGOTE_MAIN, str(theirs.fileno()), str(os.getpid()), "title"]
child = subprocess.Popen(words, pass_fds=[theirs.fileno()])
rank = {"mode": "exec", "target": "touch", "args": [sys.argv[1]], "env": {}, "label": "", "python": []}
(out, write_out), (waits, go) = os.pipe(), os.pipe()
order = json.dumps({"op": "fork", "processes": [{**rank, "files": [0, 1, 2]}]}).encode() + b"\\n"
socket.send_fds(ours, [order], [write_out, write_out, write_out, waits])
pid = json.loads(ours.recv(65536))["processes"][0]["pid"]
os.close(go if sys.argv[2] == "lost" else os.write(go, b"g") and waits)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
child.kill()
child.wait()
"""


@pytest.mark.parametrize(("how", "code"), [("known", 0), ("lost", 1)])
def test_a_program_runs_only_in_a_process_that_the_host_knows(
    tmp_path: Path, leaves_nothing: None, how: str, code: int
) -> None:
    words = [sys.executable, "-c", ORPHAN, str(tmp_path / "ran"), how]
    done = subprocess.run(words, capture_output=True, text=True, timeout=WITHIN)
    assert done.stdout == f"{code}\n", done.stderr
    assert (tmp_path / "ran").exists() == (how == "known")
