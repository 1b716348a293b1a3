# SPDX-License-Identifier: BSD-3-Clause
"""Jobs with one planted mistake each, and what an explanation of them must name."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class BrokenJob:
    """A job with a planted mistake.

    Attributes:
        name: what is wrong.
        program: the program, of which two ranks run; ``import os, sys, time`` stands before it.
        named: regular expressions, each of which the first lines of the explanation match.
        options: words after ``monarch.spmd``.
        cfg: the run options.
        files: other files in the folder of the program.
        missed: why the explanation does not name it; empty if it does.
        waits_forever: whether it is explained while it runs.
        every_time: whether it is no nightly test.
    """

    name: str
    program: str
    named: tuple[str, ...]
    options: str = "--nproc 2"
    cfg: str = "grace=2"
    files: dict[str, str] = field(default_factory=dict)
    missed: str = ""
    waits_forever: bool = False
    every_time: bool = False


_GLOO = """
import datetime, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
rank = dist.get_rank()
"""
_TORCH = "import torch\nfrom torch import nn\n"
_LOADER = """
from torch.utils.data import DataLoader, Dataset
class Records(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index == 5:
            {fault}
        return index
"""
_WATCHED = "grace=2,hang_after=4,on_hang=fail"

BROKEN_JOBS = (
    # The program cannot begin.
    BrokenJob(
        "missing package",
        "import flash_attn_nope",
        (r"No module named 'flash_attn_nope'",),
        every_time=True,
        cfg="grace=2,preload=none",
    ),
    BrokenJob("typo in an import", "from torch.distributd import init", (r"No module named 'torch\.distributd'",)),
    BrokenJob("typo in a name", "from torch import tensr", (r"cannot import name 'tensr'",)),
    BrokenJob("syntax error", "if True\n    pass", (r"SyntaxError: expected ':'", r"prog\.py, line 2")),
    BrokenJob("indentation", "def f():\nreturn 1", (r"IndentationError", r"prog\.py, line 3")),
    BrokenJob(
        "syntax error in a module",
        "import model",
        (r"SyntaxError", r"model\.py, line 1"),
        files={"model.py": "x = = 1"},
    ),
    BrokenJob(
        "circular import",
        "import left",
        (r"cannot import name 'a' .*circular import",),
        files={"left.py": "from right import b\na = 1", "right.py": "from left import a\nb = 1"},
    ),
    BrokenJob(
        "two ranks for a GPU that is not there",
        "print()",
        (r"--nproc-per-node=gpu .*(Cuda|CUDA)",),
        options="--nproc gpu",
    ),
    BrokenJob(
        "unknown argument",
        _TORCH + "import argparse\nargparse.ArgumentParser().parse_args(['--lr'])",
        (r"unrecognized arguments: --lr",),
    ),
    # What it is given is wrong.
    BrokenJob("missing file", "open('/data/none/train.csv')", (r"No such file or directory: '/data/none/train\.csv'",)),
    BrokenJob("missing variable", "os.environ['DATA_DIR']", (r"KeyError: 'DATA_DIR'", r"line 2")),
    BrokenJob("wrong variable", "int(os.environ['STEPS'])", (r"'ten'", r"line 2"), options="--nproc 2 --env STEPS=ten"),
    BrokenJob("wrong number of ranks", "assert os.environ['WORLD_SIZE'] == '4', 'needs 4 ranks'", (r"needs 4 ranks",)),
    BrokenJob("bad JSON", "import json\njson.loads('{\\'lr\\': 1}')", (r"JSONDecodeError: Expecting property name",)),
    BrokenJob("missing setting", "import types\ntypes.SimpleNamespace(lr=1).rate", (r"no attribute 'rate'",)),
    BrokenJob("no input", "input()", (r"EOFError",)),
    BrokenJob(
        "bad permission",
        "open('tool', 'w').close()\nimport subprocess\nsubprocess.run(['./tool'])",
        (r"PermissionError: .*Permission denied: '\./tool'",),
    ),
    BrokenJob("full disk", "open('/dev/full', 'w').write('x' * 99999)", (r"No space left on device",)),
    BrokenJob(
        "full disk in torch.save",
        _TORCH + "os.symlink('/dev/full', f'{os.environ[\"RANK\"]}.pt')\n"
        "torch.save(torch.ones(1 << 20), f'{os.environ[\"RANK\"]}.pt')",
        (r"No space left|disk is full",),
        missed="torch's error does not say why it could not write, and /dev/full is on a disk that is not full",
    ),
    BrokenJob(
        "checkpoint cut off",
        _TORCH + "torch.save(torch.ones(99), (p := os.environ['RANK'] + '.pt'))\nos.truncate(p, 200)\ntorch.load(p)",
        (r"PytorchStreamReader failed .*(zip archive|central directory)",),
    ),
    BrokenJob(
        "checkpoint of another model",
        _TORCH + "nn.Linear(2, 2).load_state_dict(nn.Sequential(nn.Linear(2, 2)).state_dict())",
        (r"Missing key\(s\) in state_dict: .*weight",),
    ),
    # The program is wrong.
    BrokenJob("recursion", "def f(n):\n    return f(n + 1)\nf(0)", (r"RecursionError", r"line 3, in f")),
    BrokenJob("wrong argument", "def train(lr): pass\ntrain(rate=1)", (r"unexpected keyword argument 'rate'",)),
    BrokenJob("shape mismatch", _TORCH + "nn.Linear(3, 4)(torch.ones(2, 5))", (r"mat1 and mat2 shapes .*2x5 and 3x4",)),
    BrokenJob("index of an embedding", _TORCH + "nn.Embedding(4, 2)(torch.tensor([4]))", (r"index out of range",)),
    BrokenJob("CUDA asked on a CPU", _TORCH + "torch.ones(1).cuda()", (r"CUDA|NVIDIA",)),
    BrokenJob("NCCL on a CPU", "import torch.distributed as dist\ndist.init_process_group('nccl')", (r"NCCL",)),
    BrokenJob(
        "loss is nan",
        _GLOO + "loss = torch.tensor(float('nan'))\ndist.all_reduce(loss)\n"
        "if not loss.isfinite():\n    raise ValueError(f'step 7: loss is {loss.item()}')",
        (r"both ranks|all 2 ranks", r"ValueError: step 7: loss is nan"),
    ),
    BrokenJob(
        "assertion on rank 1",
        _GLOO + "assert rank != 1, 'bad shard'\nfor _ in range(1000): dist.all_reduce(torch.ones(1))",
        (r"rank 1 .*AssertionError: bad shard",),
    ),
    BrokenJob(
        "backward twice",
        _TORCH + "x = torch.ones(1, requires_grad=True)\ny = (x * x).sum()\ny.backward()\ny.backward()",
        (r"backward through the graph a second time",),
    ),
    BrokenJob(
        "unused parameters",
        _GLOO + "from torch import nn\nm = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])\n"
        "m.forward = lambda x: m[0](x)\nd = nn.parallel.DistributedDataParallel(m)\n"
        "for _ in range(2): d(torch.ones(1, 1)).sum().backward()",
        (r"Expected to have finished reduction",),
    ),
    BrokenJob(
        "exception in a worker",
        _LOADER.format(fault="raise ValueError('record 5 is empty')") + "list(DataLoader(Records(), num_workers=1))",
        (r"ValueError: .*record 5 is empty", r"prog\.py, line \d+, in __getitem__"),
    ),
    BrokenJob(
        "killed worker",
        _LOADER.format(fault="os.kill(os.getpid(), 9)") + "list(DataLoader(Records(), num_workers=1))",
        (r"DataLoader worker .*(killed|exited)",),
    ),
    BrokenJob(
        "data that cannot be pickled",
        "from torch.utils.data import DataLoader\nif __name__ == '__main__':\n"
        "    list(DataLoader([1], num_workers=1, collate_fn=lambda x: x, multiprocessing_context='spawn'))",
        (r"[Pp]ickle.*lambda",),
    ),
    BrokenJob(
        "too many open files",
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))\n"
        "a = [open('/dev/null') for _ in range(99)]",
        (r"Too many open files",),
    ),
    # A process ends.
    BrokenJob(
        "os._exit",
        "os._exit(3) if os.environ['RANK'] == '1' else time.sleep(99)",
        (r"rank 1 .*code 3",),
        every_time=True,
        cfg="grace=2,preload=none",
    ),
    BrokenJob("sys.exit with a text", "sys.exit('no such split: tset')", (r"no such split: tset",)),
    BrokenJob(
        "segmentation fault",
        "import ctypes\nctypes.string_at(0) if os.environ['RANK'] == '1' else time.sleep(99)",
        (r"rank 1 .*SIGSEGV", r"prog\.py, line 3"),
    ),
    BrokenJob(
        "killed rank",
        "os.kill(os.getpid(), 9) if os.environ['RANK'] == '1' else time.sleep(99)",
        (r"rank 1 .*SIGKILL",),
        every_time=True,
        cfg="grace=2,preload=none",
    ),
    BrokenJob("out of memory", "bytearray(1 << 60)", (r"MemoryError",)),
    # Ranks wait for each other.
    BrokenJob(
        "port taken",
        "print()",
        (r"--master-port=\d+ cannot be opened on 127.0.0.1: Address already in use",),
        options="--nproc 2 --master-port {taken}",
    ),
    BrokenJob(
        "rank 1 does not call a collective",
        _GLOO + "if rank == 1: time.sleep(99)\ndist.all_reduce(torch.ones(1))",
        (r"rank 1 has not called gloo:all_reduce", r"prog\.py:6 in <module>"),
        cfg=_WATCHED,
    ),
    BrokenJob(
        "barrier times out",
        _GLOO.replace("=60", "=3") + "if rank == 1: time.sleep(99)\ndist.barrier()",
        (r"rank 0 .*Timed out waiting 3000ms", r"prog\.py, line 7"),
    ),
    BrokenJob(
        "both ranks receive",
        _GLOO + "dist.recv(torch.ones(1), src=1 - rank)",
        (r"no rank has called a collective or printed anything", r"prog\.py:6"),
        cfg="grace=2,hang_after=4",
        waits_forever=True,
    ),
    BrokenJob(
        "other shapes",
        _GLOO + "dist.all_reduce(torch.ones(1 + rank))\ntime.sleep(1)\ndist.all_reduce(torch.ones(1))",
        (r"rank 1 has called gloo:all_reduce \[2\] .*the others gloo:all_reduce \[1\]",),
        cfg=_WATCHED,
    ),
)
