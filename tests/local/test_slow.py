# SPDX-License-Identifier: BSD-3-Clause
"""A host that is slow is named, and another one takes its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.local.hosts import NO_PRELOAD, Hosts, torchrun


@pytest.mark.nightly(reason="most of a minute passes before the job says who slows it")
def test_a_slow_host_is_named_and_replaced_by_a_spare_one(folder: Path, script: Callable[[str], str]) -> None:
    path = script("""
        import subprocess
        from torchx_monarch import progress
        pipe = f"{sys.argv[1]}/pipe"
        is_slow = "/logs/1/" in os.environ["TORCHELASTIC_ERROR_FILE"]
        if is_slow:
            os.mkfifo(pipe)
            feeder = subprocess.Popen(["sh", "-c", f"while sleep 0.05; do echo x; done > {pipe}"])
            file = os.open(pipe, os.O_RDONLY)
        for step in range(100000 if attempt == 0 else 1):
            time.sleep(0.02)
            if is_slow:
                os.read(file, 100)
            progress(step)
    """)
    told = folder / "told"
    options = (*NO_PRELOAD, "--spares", "1", "--slow-hosts", "replace", "--on-slow", f"cat > {told}")
    hosts = Hosts(folder, torchrun(path, str(folder), nproc=1, nnodes=2), 3, options).start()
    assert hosts.wait() == [0, 0, 0], hosts.err()
    happened = hosts.events()
    kinds = [event["kind"] for event in happened]
    assert kinds.index("slow") < kinds.index("excluded") < kinds.index("spare_used"), hosts.err()
    [verdict] = [event["slowness"] for event in happened if event["kind"] == "slow"]
    assert (verdict["kind"], verdict["ranks"], verdict["path"]) == ("file", [1], f"{folder}/pipe")
    assert verdict["place"].startswith(f"{path}:") and verdict["replica"] == 1
    assert json.loads(told.read_text())["message"] == verdict["message"]
    assert " is excluded: slow since step " in hosts.err()
