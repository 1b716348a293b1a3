# SPDX-License-Identifier: BSD-3-Clause
"""Forks of a zygote end without torch's destructors of operators, where all of glibc's list is as expected."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import torchx_monarch
from tests.local.hosts import Hosts, torchrun
from tests.waits import WITHIN

FILE = str(Path(torchx_monarch.__file__).with_name("host") / "ranks" / "exit_functions.py")

EXECUTE = f"""
import json, os, sys
names = {{"__name__": "exit_functions"}}
with open({FILE!r}) as file:
    exec(file.read(), names)
"""

CHANGED = {
    "nothing": "",
    "removed before": "names['leave_operators']()",
    "another layout": "names.update(_FUNCTIONS=16, _BLOCK=names['struct'].Struct('66Q'))",
    "another mangling": "names.update(_rotated=lambda word: word)",
    "another kind of function": "names.update(_KINDS=range(1, 4))",
    "another dispatcher": "names.update(_DISPATCHER='nosuch')",
}

FORKS = """
def in_fork(change, is_ended=False):
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        exec(change, globals())
        os.write(writer, str(names["leave_operators"]()).encode())
        sys.exit(0) if is_ended else os._exit(0)
    _, status = os.waitpid(child, 0)
    return [int(os.read(reader, 100)), os.waitstatus_to_exitcode(status)]

found = {"no torch": in_fork("")}
import torch
for name, change in json.loads(sys.argv[1]).items():
    found[name] = in_fork(change, name in ("nothing", "removed before"))
print(json.dumps(found))
"""

THOUSAND = """
import gc, threading, time, torch, torch.distributed as dist
assert names["leave_operators"]()
gc.freeze()
ends = []
for number in range(1000):
    if os.fork() == 0:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(4))
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        sys.exit(number % 2)
    ends.append(os.waitstatus_to_exitcode(os.wait()[1]))
print(json.dumps(ends))
"""


WRAPPER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
struct call { void (*function)(void *); void *argument; };
static void end(void *call) { ((struct call *)call)->function(((struct call *)call)->argument); }
int __cxa_atexit(void (*function)(void *), void *argument, void *library) {
    int (*next)(void (*)(void *), void *, void *) = dlsym(RTLD_NEXT, "__cxa_atexit");
    struct call *call = malloc(sizeof *call);
    *call = (struct call){function, argument};
    return next(end, call, library);
}
"""
"""Is loaded before the C library, and calls what it would call, as sanitizers do."""


def _result(program: str, *args: str, environ: Mapping[str, str] = os.environ) -> object:
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE + program, *args],
        env=environ,
        check=True,
        stdout=subprocess.PIPE,
        timeout=20 * WITHIN,
    )
    return json.loads(done.stdout)


def test_ranks_do_not_deregister_operators(folder: Path, script: Callable[[str], str]) -> None:
    path = script(EXECUTE + "import torch\nprint('left:', names['leave_operators'](), flush=True)")
    hosts = Hosts(folder, torchrun(path, nproc=1), options=("--preload", "torch")).start()
    assert hosts.wait() == [0], hosts.err()
    assert "left: 0\n" in hosts.out()


def test_the_list_is_changed_only_if_all_of_it_is_as_expected() -> None:
    found = _result(FORKS, json.dumps(CHANGED))
    assert isinstance(found, dict)
    removed, code = found.pop("nothing")
    assert removed > 1000 and code == 0
    assert found == dict.fromkeys(["no torch", *CHANGED.keys() - {"nothing"}], [0, 0])


@pytest.mark.nightly("as other lists that are not as expected")
@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
def test_a_library_that_calls_the_functions_itself(tmp_path: Path) -> None:
    library = str(tmp_path / "wrapper.so")
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-o", library, "-"]
    subprocess.run(command, input=WRAPPER.encode(), check=True, timeout=WITHIN)
    found = _result(FORKS, json.dumps({"nothing": ""}), environ={**os.environ, "LD_PRELOAD": library})
    assert found == {"no torch": [0, 0], "nothing": [0, 0]}


@pytest.mark.nightly("takes minutes")
def test_a_thousand_ends() -> None:
    assert _result(THOUSAND) == [0, 1] * 500
