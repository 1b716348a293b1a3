# SPDX-License-Identifier: BSD-3-Clause
"""Processes that a script starts: multiprocessing in all its ways, subprocesses, launchers within a rank."""

from __future__ import annotations

import pytest

from tests.conformance.launchers import LOGS, Launchers

METHODS = ("fork", "spawn", "forkserver")

WORK = """
import json, multiprocessing, os, sys, signal, threading
from concurrent.futures import ProcessPoolExecutor

class Thing:
    def __init__(self, value):
        self.value = value

def look(thing):
    main = sys.modules["__main__"]
    return {
        "value": thing.value,
        "type": type(thing).__module__,
        "argv": sys.argv,
        "path": sys.path,
        "main": [main.__name__, getattr(main, "__file__", None), main.__package__, repr(main.__spec__)[:40]],
        "mp main": "__mp_main__" in sys.modules,
        "name": __name__,
        "rank": os.environ["RANK"],
        "orphan": multiprocessing.parent_process() is None,
        "threads": threading.active_count(),
        "signals": [repr(signal.getsignal(n)) for n in (1, 2, 10, 15)],
        "flags": repr(sys.flags),
        "cwd": os.getcwd(),
        "group": os.getpgid(0) == int(os.environ["GROUP"]),
    }

def put(queue, thing):
    queue.put(look(thing))

def fail():
    raise ValueError("in the child")

def main():
    os.environ["GROUP"] = str(os.getpgid(0))
    context = multiprocessing.get_context(os.environ["METHOD"])
    seen = {}
    queue = context.Queue()
    process = context.Process(target=put, args=(queue, Thing(1)))
    process.start()
    seen["process"] = queue.get()
    process.join()
    with context.Pool(1) as pool:
        seen["pool"] = pool.map(look, [Thing(2)])
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        seen["executor"] = executor.submit(look, Thing(3)).result()
    with context.Manager() as manager:
        seen["manager"] = dict(manager.dict(a=1))
    ends = []
    for target, args in ((fail, ()), (sys.exit, (4,)), (os._exit, (5,))):
        process = context.Process(target=target, args=args)
        process.start()
        process.join()
        ends.append(process.exitcode)
    process = context.Process(target=signal.pause)
    process.start()
    process.terminate()
    process.join()
    seen["ends"] = [*ends, process.exitcode]
    context.Process(target=signal.pause, daemon=True).start()
    with open(os.path.join(os.environ["OBSERVED"], os.environ["RANK"]), "w") as file:
        json.dump(seen, file)

if __name__ == "__main__":
    main()
"""

FORMS = {
    "script": (["pkg/work.py", "an argument"], "pkg/work.py"),
    "module": (["-m", "pkg.work", "an argument"], "pkg/work.py"),
    "folder": (["folder", "an argument"], "folder/__main__.py"),
}


@pytest.mark.parametrize(
    ("method", "form"),
    [(method, form) for method in METHODS for form in FORMS if method == "fork" or form != "folder"],
    # A child that imports its program anew cannot import a folder: so it is with python itself.
)
def test_multiprocessing(method: str, form: str, both: Launchers) -> None:
    words, path = FORMS[form]
    theirs, ours = both(words, {path: WORK}, environ={"METHOD": method}, preload="")
    assert theirs.code == ours.code == 0, theirs.err + ours.err
    assert ours.reports == theirs.reports != {}
    assert ours.files.keys() == theirs.files.keys()


LOADER = """
import json, os, sys
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info

class Numbers(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        info = get_worker_info()
        return index, info.id, int(os.environ["RANK"])

class Batch:
    def __init__(self, items):
        self.items = items

def seed(worker):
    torch.manual_seed(worker)

if __name__ == "__main__":
    seen = {}
    for method in ("fork", "spawn"):
        sampler = DistributedSampler(Numbers(), num_replicas=2, rank=int(os.environ["RANK"]), shuffle=False)
        loader = DataLoader(
            Numbers(), batch_size=2, num_workers=1, sampler=sampler, multiprocessing_context=method,
            collate_fn=Batch, worker_init_fn=seed, persistent_workers=method == "fork",
        )
        seen[method] = [batch.items for batch in loader]
    seen["threads"] = torch.get_num_threads()
    with open(os.path.join(os.environ["OBSERVED"], os.environ["RANK"]), "w") as file:
        json.dump(seen, file)
"""


def test_data_loaders(both: Launchers) -> None:
    # Given one thread; without, one rank has as many as the machine has CPUs, which cannot be recorded.
    theirs, ours = both(["prog.py"], {"prog.py": LOADER}, environ={"OMP_NUM_THREADS": "1"})
    assert theirs.code == ours.code == 0, theirs.err + ours.err
    assert ours.reports == theirs.reports
    assert ours.reports.keys() == {0}


OBJECTS = """
import multiprocessing, os, sys
from concurrent.futures import ProcessPoolExecutor

class Batch:
    def __init__(self, value):
        self.value = value

if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        with ProcessPoolExecutor(1, mp_context=context) as executor:
            print(method, executor.submit(Batch, 1).result().value, flush=True)
        with context.Pool(1) as pool:
            print(method, pool.apply(Batch, (2,)).value, flush=True)
"""


def test_children_send_back_objects_of_the_script(both: Launchers) -> None:
    theirs, ours = both([*LOGS, "prog.py"], {"prog.py": OBJECTS}, preload="")
    assert theirs.code == ours.code == 0, theirs.err + ours.err
    assert ours.log(0, "stdout.log") == theirs.log(0, "stdout.log") != b""


@pytest.mark.nightly("3 s of processor time; torch's function is multiprocessing's, which is tested every time")
def test_torch_multiprocessing(both: Launchers) -> None:
    body = """
        def work(index, number):
            with open(f"{os.environ['RANK']}.{index}", "w") as file:
                file.write(str([number, __name__, sys.argv]))
            raise ValueError("after work")
        if __name__ == "__main__":
            import torch.multiprocessing
            try:
                torch.multiprocessing.spawn(work, (7,), nprocs=1)
            except torch.multiprocessing.ProcessRaisedException as error:
                mark("ValueError: after work" in str(error))
    """
    theirs, ours = both.script(body, nproc=1)
    assert theirs.code == ours.code == 0, theirs.err + ours.err
    assert ours.files == theirs.files
    assert ours.marks() == ["0 True"]


CHILDREN = {
    "fork": "import os\npid = os.fork()\nmark('child' if not pid else os.waitpid(pid, 0)[1])\nif not pid: os._exit(0)",
    "fork that ends as a script does": "pid = os.fork()\nif pid: os.waitpid(pid, 0)\nprint(pid > 0)",
    "fork that raises": "pid = os.fork()\nif not pid: raise ValueError('child')\nmark(os.waitpid(pid, 0)[1])",
    "the same python": "import subprocess; mark(subprocess.check_output([sys.executable, '-c', "
    "'import sys, os; print(sys.path[1:], sys.flags, sys.argv, os.environ[\"LOCAL_RANK\"])']).decode())",
    "itself": "import subprocess\nmark(sys.argv)\n"
    "if len(sys.argv) == 1: sys.exit(subprocess.call([sys.executable, *sys.argv, 'again']))\nsys.exit(5)",
    "itself by exec": "mark(sys.argv)\nif len(sys.argv) == 1: os.execv(sys.executable, [*sys.orig_argv, 'again'])",
    "popen": "mark(os.popen('echo $RANK $0').read().strip()); mark(os.system('exit 3'))",
    "SIGPIPE": "import subprocess; mark(subprocess.run('yes | head -1', shell=True, capture_output=True))",
    "signals of a child": "mark(os.popen('grep Sig[PBIC] /proc/self/status').read())",
    "SIGCHLD": "import signal, subprocess\nsignal.signal(signal.SIGCHLD, lambda *_: mark('died'))\n"
    "subprocess.run('true'); import time; time.sleep(0.1)",
    "limits of a child": "mark(os.popen('ulimit -a').read())",
    "stdin of a child": "mark(repr(os.popen('cat').read()))",
    "waiting for any child": "try:\n    os.waitpid(-1, os.WNOHANG)\nexcept ChildProcessError:\n    mark('no children')",
    "environment of a child": "mark(os.popen('env | grep -E \"(RANK|WORLD_SIZE|MAX_RESTARTS)=\" | sort').read())",
    "asyncio": "import asyncio\nasync def f():\n    p = await asyncio.create_subprocess_exec('sh', '-c', 'exit 9')\n"
    "    mark(await p.wait())\nasyncio.run(f())",
}


OF_THE_MACHINE = {"signals of a child", "limits of a child"}


@pytest.mark.parametrize("name", CHILDREN)
def test_child(name: str, both: Launchers) -> None:
    options = ("--log-dir", "logs", "--redirects", "3")
    theirs, ours = both.script(CHILDREN[name], *options, nproc=1, preload="", live=name in OF_THE_MACHINE)
    assert (theirs.code == 0) == (ours.code == 0)
    assert ours.marks() == theirs.marks()
    for stream in ("stdout.log", "stderr.log"):
        assert ours.log(0, stream) == theirs.log(0, stream)


def test_launcher_within_a_rank(both: Launchers) -> None:
    """A script that launches itself when it finds no rank of its own, in the way of Accelerate's."""
    inner = "import os, sys; open('inner' + os.environ['RANK'] + sys.argv[1], 'w').write(os.environ['WORLD_SIZE'])"
    body = """
        import subprocess
        env = {n: v for n, v in os.environ.items() if n not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "inner.py", "x"]
        sys.exit(subprocess.call(command, env=env))
    """
    theirs, ours = both.script(body, nproc=1, files={"inner.py": inner}, preload="")
    assert theirs.code == ours.code == 0, theirs.err + ours.err
    assert ours.files == theirs.files
    assert ours.files["inner1x"] == b"2"
