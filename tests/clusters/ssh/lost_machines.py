# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Lose machines under running jobs: ``python -m tests.clusters.ssh.lost_machines 20 [leader]``.

Each job has a rank on each of three machines, under RetryPolicy.REPLICA. When all ranks run, the power of one machine
fails, and comes back some seconds later; the machines take turns. A loss is recovered when all ranks have begun again
once, and the job has succeeded. Prints for each loss how long the ranks did not run.

With ``leader``, a job has a rank on each of two machines, and a spare one. The machine of host 0 loses its power for as
long as the job runs: another host takes over.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import uuid
from typing import Any

from torchx.specs import AppState, RetryPolicy

from tests.clusters.ssh.apps import Apps, end_connections
from tests.clusters.ssh.machines import Machines, missing

OFF = 3.0
"""Seconds until the power is back."""

_PROGRAM = """
import os, sys, time
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
told = os.path.join(sys.argv[1], "attempt" + str(attempt) + "-" + os.environ["RANK"])
open(told, "w").close()
while attempt == 0:
    time.sleep(0.1)
"""


def lose(apps: Apps, name: str, off: float = OFF, *, leader: bool = False) -> tuple[float, str]:
    """Run a job and switch a machine off under it.

    Args:
        apps: where.
        name: the machine.
        off: seconds until it is switched on again.
        leader: whether it is that of host 0, which is not replaced, and stays off until the job has ended.

    Returns:
        Seconds from the loss to the begin of the last rank of the next attempt; what went wrong, empty if nothing did.
    """
    folder = apps.folder / uuid.uuid4().hex
    folder.mkdir()
    count = len(apps.hosts) - leader
    more: dict[str, Any] = {"max_retries": 1, "retry_policy": RetryPolicy.REPLICA}
    if leader:
        more = {"metadata": {"monarch": {"spares": 1}}}
    role = apps.torchrun(*(apps.program(_PROGRAM), str(folder)), nproc=1, replicas=count, **more)
    handle = apps.run(role, name="lost", lease=10)
    apps.until(lambda: len(list(folder.glob("attempt0-*"))) == count, "the ranks", handle)
    machine = apps.machines[name]
    began = time.time()
    machine.power_off()
    if not leader:
        time.sleep(off)
        machine.boot()
    try:
        status = apps.wait(handle, seconds=180)
    except AssertionError as error:
        return 0.0, str(error)
    finally:
        apps.machines.mend()
    begun = [path.stat().st_mtime for path in folder.glob("attempt[1-9]*-*")]
    if status.state is not AppState.SUCCEEDED or len(begun) != count:
        return 0.0, f"{status}\n{sorted(path.name for path in folder.iterdir())}\n{apps.everything(handle)}"
    return max(begun) - began, ""


def main(losses: int, leader: bool) -> int:
    """Lose so many machines, all of them of host 0 with ``leader``; return the exit code."""
    if reason := missing():
        print(reason, file=sys.stderr)
        return 1
    machines = Machines(3)
    os.environ["TORCHX_MONARCH_TEST"] = uuid.uuid4().hex
    recovered: list[float] = []
    with tempfile.TemporaryDirectory() as state:
        os.environ["MONARCH_STATE_DIR"] = state
        try:
            os.environ.update(machines.up().environ)
            for number in range(losses):
                name = machines.names[0 if leader else number % len(machines.names)]
                apps = Apps(machines)
                try:
                    seconds, wrong = lose(apps, name, leader=leader)
                finally:
                    apps.close()
                if not wrong:
                    recovered.append(seconds)
                left = machines.end_processes()
                print(f"{number + 1}: {name}: {wrong or f'{seconds:.1f} s'} {left or ''}", flush=True)
        finally:
            end_connections()
            machines.down()
    worst = f", at most {max(recovered):.1f} s" if recovered else ""
    middle = f"; in the middle {sorted(recovered)[len(recovered) // 2]:.1f} s" if recovered else ""
    print(f"{len(recovered)} of {losses} recovered{middle}{worst}")
    return 0 if len(recovered) == losses else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20, "leader" in sys.argv[2:]))
