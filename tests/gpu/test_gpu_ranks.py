# SPDX-License-Identifier: BSD-3-Clause
"""Ranks that are forks of a zygote and use GPUs, one rank for each GPU that there is: ``make test-gpu``.

Skipped without a CUDA device or a CUDA build of torch, in continuous integration, too.
"""

from __future__ import annotations

import importlib.util
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.local.hosts import Hosts

NOT_FORKS = "the ranks are not forks of one interpreter: "

PROGRAM = """
forked = "PreloadedModules" in str(sys.meta_path)
import torch
import torch.distributed as dist
local, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
before = torch.cuda.is_initialized()
torch.cuda.set_device(local)
"""
"""The beginning of every rank's program."""


def missing() -> str:
    """Return what the tests lack on this machine; empty if nothing."""
    if not Path("/dev/nvidiactl").exists():  # importing torch takes a second
        return "no CUDA device"
    if importlib.util.find_spec("torch") is None:
        return "no torch"
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is not a CUDA build"
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} cannot use the CUDA device"


pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.slow]


def launched(folder: Path, path: str, *words: str, nproc: str = "gpu", options: tuple[str, ...] = ()) -> Hosts:
    """Run a program and check that it succeeds.

    Args:
        folder: for the host.
        path: the program.
        words: further options of torchrun.
        nproc: number of ranks, or ``gpu`` for the number of GPUs.
        options: further options of the host.
    """
    command = ["torchrun", "--tee", "3", "--nproc-per-node", nproc, *words, path]
    hosts = Hosts(folder, command, options=("--grace", "5", *options)).start()
    assert hosts.wait(300) == [0], hosts.err()
    return hosts


def said(hosts: Hosts) -> set[str]:
    """The lines that ranks have printed with the mark ``said``, without the rank."""
    return {line.partition("said ")[2] for line in hosts.out().splitlines() if "said " in line}


CAN = {
    "initialize CUDA": """
values = torch.arange(1000, device="cuda")
assert not before and torch.cuda.current_device() == local and int(values.sum()) == 499500
""",
    "meet in NCCL": """
dist.init_process_group("nccl")
value = torch.full((1 << 20,), rank + 1.0, device="cuda")
dist.all_reduce(value)
assert value.unique().tolist() == [world * (world + 1) / 2], value
dist.destroy_process_group()
""",
    "replay a CUDA graph": """
given = torch.zeros(1024, device="cuda")
stream = torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream):
    for _ in range(3):
        result = given * 2 + 1
torch.cuda.current_stream().wait_stream(stream)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    result = given * 2 + 1
given.copy_(torch.full((1024,), 3.0))
graph.replay()
torch.cuda.synchronize()
assert result.unique().tolist() == [7.0], result
""",
    "pin memory, also of batches that a DataLoader's worker process loads and its thread pins": """
from torch.utils.data import DataLoader, TensorDataset
pinned = torch.ones(1 << 20).pin_memory()
copied = pinned.to("cuda", non_blocking=True)
torch.cuda.synchronize()
assert pinned.is_pinned() and copied.sum().item() == 1 << 20
loader = DataLoader(TensorDataset(torch.arange(64.0)), batch_size=16, num_workers=1, pin_memory=True)
batches = [(values.is_pinned(), values.to("cuda", non_blocking=True).sum().item()) for values, in loader]
assert all(held for held, _ in batches) and sum(total for _, total in batches) == 2016.0, batches
""",
}


@pytest.mark.parametrize("can", CAN)
def test_each_rank_can(folder: Path, script: Callable[[str], str], can: str) -> None:
    """Forks of a zygote that has been asked for the number of GPUs, as ``--nproc-per-node gpu`` does."""
    path = script(f'{PROGRAM}{CAN[can]}print("said", forked, flush=True)\n')
    assert said(hosts := launched(folder, path)) == {"True"}
    assert NOT_FORKS not in hosts.err()


def test_a_second_attempt_after_a_killed_rank(folder: Path, script: Callable[[str], str]) -> None:
    """The zygote serves an attempt after one whose ranks have used the devices."""
    path = script(
        PROGRAM
        + """
dist.init_process_group("nccl")
dist.all_reduce(torch.ones(1, device="cuda"))
torch.cuda.synchronize()
if attempt == 0:
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)
dist.destroy_process_group()
print("said", forked, attempt, flush=True)
"""
    )
    assert said(launched(folder, path, "--max-restarts", "1")) == {"True 1"}


def test_the_dump_of_a_rank_that_fails_has_the_collectives_of_nccl(folder: Path, script: Callable[[str], str]) -> None:
    path = script(
        PROGRAM
        + """
dist.init_process_group("nccl")
dist.all_reduce(torch.ones(7, device="cuda"))
torch.cuda.synchronize()
raise SystemExit(3)
"""
    )
    hosts = Hosts(folder, ["torchrun", "--nproc-per-node", "1", path]).start()
    assert hosts.wait(300) == [3], hosts.err()
    [dump] = (hosts.logs(0) / "attempt_0" / "flight_recorder").iterdir()
    assert dump.name == "nccl_rank_0"
    (called,) = pickle.loads(dump.read_bytes())["entries"]
    assert (called["process_group"][0], called["collective_seq_id"], called["input_sizes"]) == ("0", 1, [[7]])


HANGS = {
    "skips": "rank {last} has not called nccl:all_reduce, number 4 of group 0, in which rank",
    "shapes": "rank {last} has called nccl:all_reduce [7] as number 4 of group 0, the others nccl:all_reduce [1677",
    "subgroup": "rank {last} has not called nccl:all_reduce, number 1 of group 1, in which rank",
}


@pytest.mark.parametrize("how", HANGS)
def test_a_hang_of_nccl_is_named(folder: Path, script: Callable[[str], str], how: str) -> None:
    path = script(
        PROGRAM
        + f"how = {how!r}"
        + """
dist.init_process_group("nccl")
group = dist.new_group([world - 2, world - 1])
for _ in range(3):
    dist.all_reduce(torch.ones(7, device="cuda"))
torch.cuda.synchronize()
last = rank == world - 1
if how == "skips" and not last:
    dist.all_reduce(torch.ones(7, device="cuda"))
elif how == "shapes":  # the last rank sends its part at once, and the others wait for more
    dist.all_reduce(torch.ones(7 if last else 1 << 24, device="cuda"))
elif how == "subgroup" and rank == world - 2:
    dist.all_reduce(torch.ones(7, device="cuda"), group=group)
time.sleep(1000)
"""
    )
    import torch

    if (count := torch.cuda.device_count()) < 2:
        pytest.skip("one CUDA device: a rank alone waits for none")
    options = ("--grace", "1", "--hang-after", "5", "--on-hang", "fail")
    hosts = Hosts(folder, ["torchrun", "--nproc-per-node", "gpu", path], options=options).start()
    assert hosts.wait(300) == [1], hosts.err()
    assert HANGS[how].format(last=count - 1) in hosts.err()


@pytest.mark.skipif(not shutil.which("gcc"), reason="no C compiler")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
def test_torch_compile(folder: Path, script: Callable[[str], str], tmp_path: Path) -> None:
    path = script(
        f"os.environ['TORCHINDUCTOR_CACHE_DIR'] = {str(tmp_path)!r} + os.environ['LOCAL_RANK']"
        + PROGRAM
        + """
values = torch.rand(4096, device="cuda")
compiled = torch.compile(lambda x: x.sin() ** 2 + x.cos() ** 2)
print("said", forked, torch.allclose(compiled(values), torch.ones_like(values)), flush=True)
"""
    )
    assert said(launched(folder, path)) == {"True True"}


def test_ranks_are_no_forks_of_an_interpreter_that_has_initialized_cuda(
    folder: Path, script: Callable[[str], str], tmp_path: Path
) -> None:
    (tmp_path / "mod.py").write_text("import torch\nheld = torch.zeros(1, device='cuda')\n")
    path = script(PROGRAM + "print('said', forked, torch.ones(1, device='cuda').item(), flush=True)\n")
    # Not "gpu": the number of devices is asked for in a fork, which that interpreter's could not tell.
    hosts = launched(folder, path, nproc="1", options=("--preload", "mod"))
    assert said(hosts) == {"False 1.0"}
    [line] = [line for line in hosts.err().splitlines() if NOT_FORKS in line]
    assert "mod keeps /dev/nvidia" in line or "mod runs a thread" in line
