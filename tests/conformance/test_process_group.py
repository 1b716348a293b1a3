# SPDX-License-Identifier: BSD-3-Clause
"""torch.distributed in a rank: every way to form a process group, and the store after its first users have gone."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from tests.conformance.differences import Difference, differs
from tests.conformance.launchers import Launchers

EXPRESSIONS = {
    "is launched by torchelastic": "dist.is_torchelastic_launched()",
    "threads": "torch.get_num_threads()",
    "before": "[dist.is_available(), dist.is_initialized()]",
    "env://": "init()",
    "sum": "total()",
    "subgroups": "subgroups()",
    "objects": "objects()",
    "point to point": "point_to_point()",
    "monitored barrier": "dist.monitored_barrier()",
    "device mesh": "mesh()",
    "DDP": "ddp()",
    "client of the store": "[client('c').set('k%d' % RANK, 'v'), client('c').get('k%d' % (1 - RANK)).decode()]",
    "counter in the store": "counted()",
    "destroyed": "[dist.barrier(), dist.destroy_process_group(), dist.is_initialized()]",
    "server on the same port": "serve()",
}

SCRIPT = """
import datetime, json, os, sys
import torch, torch.distributed as dist
RANK = int(os.environ["RANK"])

def client(prefix):
    port = int(os.environ["MASTER_PORT"])
    return dist.PrefixStore(prefix, dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False))

def init():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10))
    return [dist.get_rank(), dist.get_world_size(), dist.get_backend()]

def total():
    value = torch.tensor([RANK + 1.0])
    dist.all_reduce(value)
    return value.item()

def subgroups():
    groups = [dist.new_group([0]), dist.new_group([0, 1])]
    ones = torch.ones(1)
    dist.all_reduce(ones, group=groups[1])
    return [ones.item(), [dist.get_rank(one) for one in groups]]

def objects():
    gathered = [None, None]
    dist.all_gather_object(gathered, {"rank": RANK})
    sent = ["from 0" if RANK == 0 else None]
    dist.broadcast_object_list(sent)
    return gathered + sent

def point_to_point():
    value = torch.tensor([float(RANK)])
    if RANK == 0:
        dist.send(value + 5, 1)
    else:
        dist.recv(value, 0)
    return value.item()

def mesh():
    found = dist.device_mesh.init_device_mesh("cpu", (2,))
    return [found.get_local_rank(), found.size()]

def ddp():
    torch.manual_seed(RANK)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.ones(1, 2) * (RANK + 1)).sum().backward()
    return model.module.weight.grad.tolist()

def counted():
    store = client("count")
    store.add("n", 1)
    while store.add("n", 0) < 2:
        pass
    return store.add("n", 0)

def serve():
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    dist.TCPStore(host, port, is_master=RANK == 0, wait_for_workers=False, timeout=datetime.timedelta(seconds=5))

def observe(expression):
    try:
        return eval(expression)
    except Exception as error:
        return type(error).__name__

seen = {name: observe(expression) for name, expression in json.loads(os.environ["EXPRESSIONS"]).items()}
with open(os.path.join(os.environ["OBSERVED"], os.environ["RANK"]), "w") as file:
    json.dump(seen, file)
"""

Reports = dict[int, Any]

_seen: list[tuple[Reports, Reports]] = []


def observe(both: Launchers, names: Iterable[str], preload: str = "torch", name: str = "") -> tuple[Reports, Reports]:
    environ = {"EXPRESSIONS": json.dumps({name: EXPRESSIONS[name] for name in names}), "OMP_NUM_THREADS": None}
    words = ["--nproc-per-node", "2", "prog.py"]
    theirs, ours = both(words, {"prog.py": SCRIPT}, environ=environ, preload=preload, name=name)
    return theirs.reports, ours.reports


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_process_group(name: str, both: Launchers) -> None:
    if not _seen:
        _seen.append(observe(both, EXPRESSIONS, name="test_process_group.py"))
    theirs, ours = _seen[0]
    assert ours.keys() == theirs.keys() == {0, 1}
    for rank in range(2):
        assert ours[rank][name] == theirs[rank][name]


@pytest.mark.nightly("8 s of processor time; test_endpoint.py forms a group without preload every time")
def test_process_group_without_preload(both: Launchers) -> None:
    theirs, ours = observe(
        both, ["is launched by torchelastic", "env://", "sum", "objects", "destroyed", "threads"], preload=""
    )
    assert ours == theirs
    assert ours.keys() == {0, 1}


def test_second_group_that_meets_in_a_file(both: Launchers) -> None:
    """By env:// again would test torch: the store keeps the first group's addresses, and a rank may read them."""
    body = """
        import torch, torch.distributed as dist
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo")
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/file", rank=rank, world_size=2)
        ones = torch.ones(1)
        dist.all_reduce(ones)
        report(ones.item())
        dist.barrier()
        dist.destroy_process_group()
    """
    theirs, ours = both.script(body)
    assert ours.reports == theirs.reports == {0: 2.0, 1: 2.0}


def test_store_after_rank_0_has_ended(both: Launchers) -> None:
    body = """
        import time
        import torch.distributed as dist
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        store.set(os.environ["RANK"], "here")
        store.get(str(1 - int(os.environ["RANK"])))
        if os.environ["RANK"] == "0":
            open("gone", "w").write(str(os.getpid()))
            sys.exit(0)
        wait_for("gone")
        while os.path.exists(f"/proc/{open('gone').read() or 'self'}/fd/0"):
            time.sleep(0.02)
        store.set("late", "word")
        mark(store.get("late").decode())
    """
    theirs, ours = both.script(body)
    assert theirs.marks() == ["1 word"]
    assert ours.marks() == theirs.marks(), ours.err.decode()
    assert theirs.code == ours.code == 0


def test_group_of_ranks_that_outlive_rank_0(both: Launchers) -> None:
    body = """
        import torch, torch.distributed as dist
        rank = int(os.environ["RANK"])
        if rank == 0:
            sys.exit(0)
        dist.init_process_group("gloo", rank=rank - 1, world_size=2)
        ones = torch.ones(1)
        dist.all_reduce(ones)
        report(ones.item())
        dist.barrier()
        dist.destroy_process_group()
    """
    theirs, ours = both.script(body, nproc=3)
    assert theirs.reports == ours.reports == {1: 2.0, 2: 2.0}
    assert theirs.code == ours.code == 0, ours.err.decode()


def test_rank_has_no_child_that_it_did_not_start(both: Launchers) -> None:
    body = """
        try:
            os.wait()
        except ChildProcessError as error:
            report(str(error))
    """
    theirs, ours = both.script(body)
    assert theirs.reports == ours.reports == dict.fromkeys(range(2), "[Errno 10] No child processes")


@differs(Difference.EXIT_CODE)
def test_peer_of_a_failed_rank_in_a_collective(both: Launchers) -> None:
    body = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        if os.environ["RANK"] == "1":
            raise ValueError("the cause")
        dist.all_reduce(torch.ones(1))
    """
    theirs, ours = both.script(body)
    assert theirs.code == ours.code == 1
    assert ours.error["message"].endswith("ValueError: the cause")
    assert "rank 1 " in ours.error["message"]


@differs(Difference.RECORDER)
@pytest.mark.nightly("7 s of processor time: the torchrun of this machine, and four imports of torch")
def test_a_rank_with_a_group_has_one_more_thread(both: Launchers) -> None:
    body = """
        import json, sys, threading
        import torch.distributed as dist
        def count():
            return [len(sys._current_frames()), threading.active_count(), len(threading.enumerate())]
        before = count()
        dist.init_process_group("gloo")
        dist.barrier()
        report([before, count()])
        dist.barrier()
    """
    theirs, ours = both.script(body, preload="torch", live=True)
    assert list(theirs.reports.values()) == [[[1, 1, 1], [1, 1, 1]]] * 2
    threads = 1 if both.ranks == "fresh" else 2
    assert list(ours.reports.values()) == [[[1, 1, 1], [threads, 1, 1]]] * 2
