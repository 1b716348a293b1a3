# SPDX-License-Identifier: BSD-3-Clause
"""The script of a Monarch controller, without a scheduler: it runs on the first host alone, and ends the job."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.local.hosts import Hosts
from tests.waits import until

COMMAND = ["python", "-m", "torchx_monarch.actors", "--", "python"]


def test_a_script_is_stopped_with_its_host(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b'saved\\n'), sys.exit(0)))\n"
        "print('begun', os.environ['RANK'], os.environ['WORLD_SIZE'], flush=True)\n"
        "time.sleep(1000)\n"
    )
    hosts = Hosts(folder, [*COMMAND, str(script)], replicas=2).start()
    until(lambda: "begun 0 1" in hosts.out(), "the script")
    hosts.processes[0].send_signal(signal.SIGTERM)
    assert hosts.wait() == [143, 143]
    assert "saved" in hosts.out() and "begun" not in hosts.out(1)
    assert "preempted" in hosts.err()


def test_a_script_that_is_not_there_is_said_to_be_missing(folder: Path) -> None:
    hosts = Hosts(folder, [*COMMAND, "nosuch.py"], replicas=2).start(1)
    # Those that come late are told for a moment only (see tests/unit/test_rendezvous.py).
    until(lambda: any(folder.glob("h*/attach")), "the host to look for replica 0")
    hosts.start(0)
    assert hosts.wait() == [2, 2]
    assert "nosuch.py': No such file or directory" in hosts.err()
