# SPDX-License-Identifier: BSD-3-Clause
"""Which values differ between ranks, attempts and runs: random numbers, names that must be unique, addresses.

The values themselves cannot be compared with torchrun's. What is compared is which processes have equal ones.
"""

from __future__ import annotations

import json
from typing import Any

from tests.conformance.differences import Difference, differs
from tests.conformance.launchers import Launchers, Outcome

VALUES = {
    "shared memory": "[line for line in open('/proc/self/maps') if line.split()[1] == 'rw-s']",
    "children of a seed": "own.numpy_own.bit_generator.seed_seq.spawn(1)[0].generate_state(2)",
    "start of the log": "logging.makeLogRecord({}).created - logging._startTime <= age() + 0.01",
    "time of children": "os.times()[2:4]",
    "random.random": "random.random()",
    "random.Random": "random.Random().random()",
    "random.SystemRandom": "random.SystemRandom().random()",
    "numpy.random.rand": "numpy.random.rand()",
    "numpy.random.RandomState": "numpy.random.RandomState().rand()",
    "numpy.random.default_rng": "numpy.random.default_rng().random()",
    "torch.initial_seed": "torch.initial_seed()",
    "torch.get_rng_state": "torch.get_rng_state().tolist()",
    "torch.rand": "torch.rand(2)",
    "torch.randn": "torch.randn(2)",
    "torch.randperm": "torch.randperm(100).tolist()",
    "torch.nn.Dropout": "torch.nn.Dropout(0.5)(torch.ones(100)).tolist()",
    "torch.nn.Linear": "torch.nn.Linear(2, 2).weight",
    "torch.utils.data.random_split": "list(torch.utils.data.random_split(range(100), [50, 50])[0])",
    "DataLoader(shuffle=True)": "[int(one) for one in torch.utils.data.DataLoader(range(100), shuffle=True)]",
    "seed of a worker of DataLoader": "next(iter(torch.utils.data.DataLoader(Seeds(), num_workers=1)))",
    "default seed of torch.Generator": "torch.Generator().initial_seed()",
    "torch.Generator.seed": "torch.Generator().seed()",
    "seeds of CUDA": "[torch.cuda.is_initialized(), torch.cuda.default_generators]",
    "name of torch's shared memory": "shared_name()",
    "uuid.getnode": "uuid.getnode()",
    "uuid.uuid1": "uuid.uuid1()",
    "uuid.uuid4": "uuid.uuid4()",
    "os.urandom": "os.urandom(8)",
    "secrets.token_hex": "secrets.token_hex()",
    "ssl.RAND_bytes": "ssl.RAND_bytes(8)",
    "tempfile.mktemp": "tempfile.mktemp()",
    "temporary folder of multiprocessing": "multiprocessing.util.get_temp_dir()",
    "key of multiprocessing": "bytes(multiprocessing.current_process().authkey)",
    "name of a semaphore": "multiprocessing.synchronize.SemLock._make_name()",
    "name of a process": "[multiprocessing.Process().name, multiprocessing.current_process()._identity]",
    "hash of a string": "hash('a')",
    "address of an object": "id(object)",
    "address of the thread": "threading.get_ident()",
    "id of the thread": "threading.main_thread().native_id - os.getpid()",
    "tools of sys.monitoring": "[sys.monitoring.get_tool(n) for n in range(6)] if sys.version_info >= (3, 12) else []",
}
"""Expressions by what they show."""

OWN = """
import random
from numpy.random import RandomState, default_rng
python, python_fixed = random.Random(), random.Random(7)
numpy_own, numpy_fixed, numpy_state = default_rng(), default_rng(7), RandomState()
reseeded = random.Random()
reseeded.seed(7)
"""
"""A module that holds generators."""

ADDRESSES = {"hash of a string", "address of an object", "address of the thread"}
"""What differs under torchrun, and here is shared by forks."""

PROGRAM = f"""
import gc, hashlib, logging, time
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
import own
import multiprocessing.synchronize, multiprocessing.util, random, secrets, ssl, tempfile, threading, uuid
import numpy.random, torch

class Seeds(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield [torch.initial_seed(), random.random(), numpy.random.rand()]

def age():
    with open("/proc/self/stat") as file:
        start = file.read().rpartition(")")[2].split()[19]
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(start) / os.sysconf("SC_CLK_TCK")

def shared_name():
    storage = torch.ones(1).untyped_storage()
    return os.readlink(f"/proc/self/fd/{{storage._share_fd_cpu_()[0]}}")

def generators():
    '''The states of the random generators that modules, classes and default arguments name.'''
    states = {{
        random.Random: lambda one: one.getstate(),
        numpy.random.BitGenerator: lambda one: one.state,
        numpy.random.Generator: lambda one: one.bit_generator.state,
        numpy.random.RandomState: lambda one: one.get_state(),
        torch.Generator: lambda one: one.get_state().tolist(),
    }}
    for holder in gc.get_objects():
        if type(holder) is dict:
            place, values = holder.get("__name__") or holder.get("__module__"), dict(holder)
        elif type(holder) is type(generators):
            place, values = f"{{holder.__module__}}.{{holder.__qualname__}}", dict(enumerate(holder.__defaults__ or ()))
        else:
            continue
        for name, value in values.items() if place else []:
            for kind, state in states.items():
                if issubclass(type(value), kind) and type(value) is not random.SystemRandom:
                    yield f"generator {{place}}.{{name}}", state(value)

gc.unfreeze()
seen = dict(generators())
seen |= {{name: eval(expression) for name, expression in {VALUES!r}.items()}}
seen = {{name: int(hashlib.sha256(repr(value).encode()).hexdigest()[:12], 16) for name, value in seen.items()}}
with open(f"new.{{rank}}", "w") as file:
    json.dump(seen, file)
os.rename(f"new.{{rank}}", f"seen.{{attempt}}.{{rank}}")
if attempt == "0":
    wait_for("seen.0.0")
    sys.exit(3) if rank == "1" else rest()
"""


def relations(runs: list[Outcome]) -> dict[str, str]:
    """For each value, between which processes it is equal."""
    seen: dict[tuple[int, ...], dict[str, int]] = {
        (run, attempt, rank): json.loads(outcome.files[f"seen.{attempt}.{rank}"])
        for run, outcome in enumerate(runs)
        for attempt in (0, 1)
        for rank in (0, 1)
    }

    def equal(name: str, axis: int) -> str:
        pairs = [(case, (*case[:axis], 1, *case[axis + 1 :])) for case in seen if case[axis] == 0]
        results = {seen[case][name] == seen[other][name] for case, other in pairs}
        return "mixed" if len(results) == 2 else "equal" if results.pop() else "differ"

    names = set[str]().union(*seen.values())
    return {
        name: ", ".join(f"{what} {equal(name, axis)}" for axis, what in enumerate(("runs", "attempts", "ranks")))
        if all(name in values for values in seen.values())
        else "not in all"
        for name in names
    }


@differs(Difference.SHARED_BY_FORKS)
def test_values_of_a_process(both: Launchers) -> None:
    """With torch alone; ``python -m tests.survey`` looks at the packages of others."""
    runs = [both.script(PROGRAM, "--max-restarts", "1", files={"own.py": OWN}, preload="torch,own") for _ in range(2)]
    assert {(run.theirs.code, run.ours.code) for run in runs} == {(0, 0)}, runs[0].theirs.err + runs[0].ours.err
    theirs, ours = relations([run.theirs for run in runs]), relations([run.ours for run in runs])
    different: dict[str, Any] = {
        name: (theirs.get(name), ours.get(name)) for name in {*theirs, *ours} if theirs.get(name) != ours.get(name)
    }
    assert different.keys() == (ADDRESSES if both.ranks == "fork" else set()), different
