# SPDX-License-Identifier: BSD-3-Clause
"""What a rank does between the end of its program and that of its process: here, under torchrun, in an interpreter."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.launchers import LOGS, Launchers, Outcome
from tests.conformance.test_ends import expected_code

pytestmark = [
    pytest.mark.skipif(not shutil.which("g++"), reason="needs g++"),
    pytest.mark.nightly("each case imports torch three times"),
]

_SOURCE = Path(__file__).with_name("own.cpp")

PROGRAM = """
import atexit, ctypes, signal, tempfile, threading, time, weakref
import torch, torch.distributed as dist
from torch.utils.data import DataLoader

said = os.open("python", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def say(text, os=os, said=said):
    os.write(said, text.encode() + b"\\n")

class Object:
    def __init__(self, name): self.name = name
    def __del__(self, say=say): say(f"__del__ {self.name}")

of_main, torch.of_the_user = Object("of main"), Object("of torch")
atexit.register(say, "atexit")
weakref.finalize(of_main, say, "finalize")
temporary = tempfile.TemporaryDirectory(dir=".", prefix="temporary")
ctypes.CDLL(os.environ["OWN"]).begin()
assert torch.ops.own.twice(torch.ones(1)).item() == 2

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
library = torch.library.Library("of_the_user", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: 2 * x, "CPU")
assert torch.ops.of_the_user.twice(torch.ones(1)).item() == 2

def trace(profile):
    profile.export_chrome_trace("trace.json")

def record(*_):
    with open("flight.json", "w") as file:
        file.write(torch._C._distributed_c10d._dump_fr_trace_json(True, False).decode())

stopped = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
with stopped:
    torch.ones(4).add(1)
atexit.register(trace, stopped)
atexit.register(record)
loader = DataLoader(list(range(8)), num_workers=1, persistent_workers=True, collate_fn=list)
assert len(list(loader)) == 8
sys.stdout.write("text without a newline")
"""
"""Leaves to its end what Python, C++, torch and the C library do there."""

SUDDEN = ("os._exit", "os._exit in a thread", "SIGTERM", "abort", "running profiler")
"""The ends after which gcov's counters are not written: with torch 2.13 a running profiler crashes the end."""

ENDS = {
    "return": "",
    "sys.exit(0)": "sys.exit(0)",
    "sys.exit(7)": "sys.exit(7)",
    "sys.exit of a text": "sys.exit('a message')",
    "exception": "raise ValueError('x')",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "os._exit": "os._exit(9)",
    "exit of C": "ctypes.CDLL(None).exit(5)",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
    "abort": "os.abort()",
    "exit in a thread": "thread = threading.Thread(target=sys.exit, args=(3,)); thread.start(); thread.join()",
    "os._exit in a thread": "threading.Thread(target=os._exit, args=(3,)).start(); time.sleep(60)",
    "daemon thread": "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "thread that ends later": "threading.Thread(target=lambda: (time.sleep(0.3), say('thread'))).start()",
    "atexit that fails": "atexit.register(lambda: 1 / 0)",
    "atexit that exits": "atexit.register(sys.exit, 4)",
    "children": "import multiprocessing; multiprocessing.Process(target=say, args=('child',)).start()",
    "group destroyed": "dist.destroy_process_group()",
    "running profiler": "running = torch.profiler.profile(on_trace_ready=trace); running.start()",
}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Compile the library twice: the program's own, with operators and gcov's counters, and one to be loaded first."""
    folder, made, torch = tmp_path_factory.mktemp("libraries"), {}, sysconfig.get_path("platlib") + "/torch"
    headers = ("-isystem", f"{torch}/include", "-isystem", f"{torch}/include/torch/csrc/api/include")
    own = ("--coverage", "-DWITH_TORCH", "-std=c++20", *headers, f"-L{torch}/lib", "-ltorch_cpu", "-lc10")
    for name, options in (("own", own), ("preloaded", ())):
        made[name] = str(folder / f"{name}.so")
        command = ["g++", "-shared", "-fPIC", "-fvisibility=hidden", f'-DNAME="{name}"', str(_SOURCE), *options]
        subprocess.run([*command, "-o", made[name]], check=True, cwd=folder, timeout=300)
    return made


def _seen(outcome: Outcome) -> dict[str, Any]:
    """What the end has left: of traces and recordings, what they are of; of errors, no numbers.

    That a running profiler misses its callback depends on the order in which Python deletes modules.
    """
    seen: dict[str, Any] = {path: data for path, data in outcome.files.items() if not path.startswith("logs/")}
    seen["stdout"], errors = outcome.log(0, "stdout.log"), outcome.log(0, "stderr.log") or b""
    errors = re.sub(rb".*Requested callback is not found\n", b"", errors.partition(b"Fatal Python error")[0])
    seen["stderr"] = re.sub(rb"0x[0-9a-f]+|\d+", b"N", errors)
    if "trace.json" in seen:
        seen["trace.json"] = {event["name"] for event in json.loads(seen["trace.json"])["traceEvents"]}
    if "flight.json" in seen:
        entries = json.loads(seen["flight.json"])["entries"]
        seen["flight.json"] = [(entry["profiling_name"], entry["state"]) for entry in entries]
    return seen


@pytest.mark.parametrize("end", ENDS)
def test_end(end: str, both: Launchers, libraries: dict[str, str], tmp_path: Path) -> None:
    work = tmp_path / "work"
    environ = {
        "ENDS": str(work),
        "OWN": libraries["own"],
        "LD_PRELOAD": libraries["preloaded"],
        "GCOV_PREFIX": str(work),
        "GCOV_PREFIX_STRIP": "99",
        "TORCH_FR_BUFFER_SIZE": "100",
    }
    theirs, ours = both.script(PROGRAM + ENDS[end], *LOGS, nproc=1, environ=environ, live=True)
    assert ours.code == expected_code(theirs), ours.err.decode()
    seen = _seen(ours)
    assert seen == _seen(theirs)
    assert [path for path in seen if path.endswith(".gcda")] or end in SUDDEN
