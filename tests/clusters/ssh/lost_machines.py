# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Lose the machine of host 0 under running jobs: ``python -m tests.clusters.ssh.lost_machines 20``.

Each job has a rank on each of two machines, and a spare one. The machine of host 0 loses its power for as long as the
job runs: another host takes over. A loss is recovered when all ranks have begun again once, and the job has succeeded.
Prints for each loss how long the ranks did not run.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import uuid

from torchx.specs import AppState

from tests.clusters.ssh.apps import Apps, end_connections
from tests.clusters.ssh.machines import Machines, missing

_PROGRAM = """
import os, sys, time
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
told = os.path.join(sys.argv[1], "attempt" + str(attempt) + "-" + os.environ["RANK"])
open(told, "w").close()
while attempt == 0:
    time.sleep(0.1)
"""


def lose(apps: Apps) -> tuple[float, str]:
    """Run a job and switch the machine of host 0 off under it, until the job has ended.

    Returns:
        Seconds from the loss to the begin of the last rank of the next attempt; what went wrong, empty if nothing did.
    """
    folder = apps.folder / uuid.uuid4().hex
    folder.mkdir()
    count = len(apps.hosts) - 1
    spare = {"monarch": {"spares": 1}}
    role = apps.torchrun(*(apps.program(_PROGRAM), str(folder)), nproc=1, replicas=count, metadata=spare)
    handle = apps.run(role, name="lost", lease=10)
    apps.until(lambda: len(list(folder.glob("attempt0-*"))) == count, "the ranks", handle)
    began = time.time()
    apps.machines[apps.hosts[0]].power_off()
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


def main(losses: int) -> int:
    """Lose so many machines; return the exit code."""
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
                apps = Apps(machines)
                try:
                    seconds, wrong = lose(apps)
                finally:
                    apps.close()
                if not wrong:
                    recovered.append(seconds)
                left = machines.end_processes()
                print(f"{number + 1}: {wrong or f'{seconds:.1f} s'} {left or ''}", flush=True)
        finally:
            end_connections()
            machines.down()
    worst = f", at most {max(recovered):.1f} s" if recovered else ""
    middle = f"; in the middle {sorted(recovered)[len(recovered) // 2]:.1f} s" if recovered else ""
    print(f"{len(recovered)} of {losses} recovered{middle}{worst}")
    return 0 if len(recovered) == losses else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20))
