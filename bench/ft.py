# SPDX-License-Identifier: BSD-3-Clause
"""torchft's groups here and under torchrun in a shell loop: ``python bench/ft.py [--rounds N]``.

Needs torchft. Two groups of one rank train, with a lighthouse that misses a group after a second; after ten steps the
rank of one kills itself. Measured are from its death, as medians with the least and the greatest: the seconds until the
group takes part in a step again, the longest pause of the other group, and how many steps this has lost. The variants
alternate.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from words import spread

PROGRAM = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
folder, group = sys.argv[1], os.environ["REPLICA_GROUP_ID"]
dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
sgd = torch.optim.SGD(model.parameters(), 0.1)
def load(found):
    model.load_state_dict(found["model"]); sgd.load_state_dict(found["sgd"])
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), load_state_dict=load, min_replica_size=1,
    state_dict=lambda: {"model": model.state_dict(), "sgd": sgd.state_dict()}, replica_id=f"g{group}_",
    use_async_quorum=False,
)
parallel, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, sgd)
together = 0
while not os.path.exists(f"{folder}/end"):
    before = manager.current_step()
    optimizer.zero_grad()
    parallel(torch.rand(4, 8)).mean().backward()
    optimizer.step()
    together += manager.num_participants() == 2
    with open(f"{folder}/steps-{group}", "a") as file:
        print(time.time(), manager.num_participants(), manager.current_step() - before, file=file)
    if group == "1" and together == 10 and not os.path.exists(f"{folder}/killed"):
        with open(f"{folder}/killed", "w") as file:
            file.write(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
os._exit(0)
"""

HEARTBEAT = ["--heartbeat_timeout_ms", "1000"]

LIGHTHOUSE = ["torchft_lighthouse", "--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]


def ours(path: str, folder: str) -> list[subprocess.Popen[bytes]]:
    """Start the job."""
    words = ["torchx", "run", "-s", "monarch_local", "--wait", "monarch.ft", *HEARTBEAT, "-j", "2x1", path, folder]
    return [subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)]


def torchrun(path: str, folder: str) -> list[subprocess.Popen[bytes]]:
    """Start a lighthouse, and a shell loop for each group."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--standalone", path, folder]
    started = [[*LIGHTHOUSE, *HEARTBEAT, "--bind", f"127.0.0.1:{port}"]]
    started += [["sh", "-c", 'until "$@"; do :; done', "sh", *command]] * 2
    environ = {**os.environ, "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "NUM_REPLICA_GROUPS": "2"}
    return [
        subprocess.Popen(
            words,
            env={**environ, "REPLICA_GROUP_ID": str(max(0, group))},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for group, words in enumerate(started, -1)
    ]


def measure(start: object) -> tuple[float, float, int]:
    """Return the seconds until the group is back, the longest pause of the other, and the steps that this has lost."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["MONARCH_STATE_DIR"] = f"{folder}/state"
        path = Path(folder, "train_ft.py")
        path.write_text(PROGRAM)
        processes = start(str(path), folder)  # type: ignore[operator]

        def steps(group: int) -> list[tuple[float, int, int]]:
            file = Path(folder, f"steps-{group}")
            lines = file.read_text().splitlines() if file.exists() else []
            return [(float(when), int(count), int(done)) for when, count, done in map(str.split, lines)]

        try:
            until = time.monotonic() + 120
            while True:
                killed = Path(folder, "killed")
                death = float(killed.read_text()) if killed.exists() and killed.read_text() else 0.0
                back = [when for when, count, _ in steps(1) if death and when > death and count == 2]
                if len(back) > 5:
                    break
                if time.monotonic() > until:
                    raise RuntimeError(f"the group is not back: {steps(0)[-3:]} {steps(1)[-3:]}")
                time.sleep(0.1)
            after = [step for step in steps(0) if step[0] > death - 0.2]
            pauses = [later[0] - earlier[0] for earlier, later in zip(after, after[1:], strict=False)]
            return back[0] - death, max(pauses), sum(not done for _, _, done in after)
        finally:
            Path(folder, "end").touch()
            for process in processes[1:] or processes:
                process.wait(120)
            for process in processes:
                process.send_signal(signal.SIGTERM)
                process.wait(30)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each variant (default: 5)")
    rounds = parser.parse_args().rounds
    found: dict[str, list[tuple[float, float, int]]] = {"torchrun in a loop": [], "monarch.ft": []}
    for _ in range(rounds):
        for name, start in (("torchrun in a loop", torchrun), ("monarch.ft", ours)):
            found[name].append(measure(start))
    print(f"{'':>20} {'back after, s':>24} {'longest pause, s':>24} {'lost steps':>10}")
    for name, results in found.items():
        back, pause, lost = ([result[at] for result in results] for at in range(3))
        print(f"{name:>20} {spread(back):>24} {spread(pause):>24} {statistics.median(lost):>10}")


if __name__ == "__main__":
    main()
