# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The same script under torchrun and under a host process: what it can see of itself must be the same."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.local.hosts import Hosts

_OBSERVE = textwrap.dedent("""
    import inspect, json, multiprocessing, os, pickle, signal, sys, threading

    def double(x):
        return 2 * x

    class Data:
        def __len__(self):
            return 8
        def __getitem__(self, index):
            return double(index)

    def main():
        import torch
        import torch.distributed as dist
        from torch.utils.data import DataLoader

        dist.init_process_group("gloo")
        ones = torch.ones(1)
        dist.all_reduce(ones)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            doubled = pool.map(double, [1, 2])
        loader = DataLoader(Data(), batch_size=4, num_workers=1, multiprocessing_context="spawn")
        module = sys.modules["__main__"]
        seen = {
            "argv": sys.argv,
            "path0": sys.path[0],
            "package_dir_on_path": any(p.endswith("torchx_monarch/runtime") for p in sys.path),
            "cwd": os.getcwd(),
            "main": {n: repr(getattr(module, n, "absent")) for n in ("__file__", "__name__", "__package__", "__doc__")},
            "spec": getattr(module.__spec__, "name", None),
            "loader": type(module.__loader__).__name__,
            "own names in __main__": sorted(n for n in vars(module) if not n.startswith("__")),
            "is __main__": module.main is main and inspect.getmodule(main) is module,
            "source": inspect.getsource(double),
            "pickled": pickle.loads(pickle.dumps(double))(4),
            "spawned": doubled,
            "loaded": [batch.tolist() for batch in loader],
            "thread": threading.current_thread() is threading.main_thread(),
            "threads": threading.active_count(),
            "signals": [repr(signal.getsignal(n)) for n in (1, 2, 3, 10, 12, 13, 15)],
            "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "unbuffered": sys.stdout.write_through,
            "interpreter": sys.executable,
            "hook": sys.excepthook is sys.__excepthook__,
            "leader": os.getpgid(0) == os.getpid(),
            "sum": ones.item(),
            "env": {
                n: v
                for n, v in os.environ.items()
                if n.startswith(("TORCHELASTIC", "OMP_", "MASTER_ADDR", "TORCH_NCCL"))
                or n.endswith(("RANK", "WORLD_SIZE", "ROLE_NAME"))
            },
        }
        dist.destroy_process_group()
        with open(os.path.join(os.environ["OBSERVED"], os.environ["RANK"]), "w") as file:
            json.dump(seen, file)

    if __name__ == "__main__":
        main()
""")

_DIFFERENCES = {
    # Ours is a path of the job; torchrun's of a temporary folder.
    "TORCHELASTIC_ERROR_FILE",
    # torchrun draws a random one when it is not told; ours is the app's id, which a person can find again.
    "TORCHELASTIC_RUN_ID",
    # torchrun: the machine's name; ours: the loopback address that the store is bound to, and nothing else can reach.
    "MASTER_ADDR",
}


def observe(folder: Path, command: list[str], cwd: Path, under: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    observed = folder / under
    observed.mkdir()
    monkeypatch.setenv("OBSERVED", str(observed))
    monkeypatch.chdir(cwd)
    if under == "torchrun":
        subprocess.run([sys.executable, "-m", "torch.distributed.run", *command[1:]], check=True, timeout=100)
    else:
        run_dir = Path(tempfile.mkdtemp(prefix="h"))
        hosts = Hosts(run_dir, command).start()
        assert hosts.wait(100) == [0], hosts.err()
    return [json.loads((observed / str(rank)).read_text()) for rank in range(2)]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("form", ["script", "module"])
def test_a_script_sees_the_same(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work dir"
    (work / "pkg").mkdir(parents=True)
    (work / "pkg" / "__init__.py").touch()
    (work / "pkg" / "observe.py").write_text(_OBSERVE)
    (work / "link.py").symlink_to(work / "pkg" / "observe.py")
    program = ["link.py"] if form == "script" else ["-m", "pkg.observe"]
    command = ["torchrun", "--nproc-per-node", "2", *program, '--x=a b"c,$d', "", "é\n", "--nnodes", "7"]
    theirs = observe(tmp_path, command, work, "torchrun", monkeypatch)
    ours = observe(tmp_path, command, work, "host", monkeypatch)
    for rank in range(2):
        for environment in (theirs[rank]["env"], ours[rank]["env"]):
            assert set(environment) >= _DIFFERENCES
            for name in _DIFFERENCES:
                del environment[name]
        assert ours[rank] == theirs[rank]
