# SPDX-License-Identifier: BSD-3-Clause
"""A cluster of the tests to work with by hand: ``python -m tests.clusters up|down NAME``, or ``make NAME-up``.

``up`` starts it under a process of its own and prints the variables that clients need; ``down`` ends it. What a cluster
is says the module ``tests.clusters.NAME.by_hand``: within its ``running()``, which yields those variables, it runs.
"""

from __future__ import annotations

import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from torchx_monarch.backends.core import state_files
from torchx_monarch.system import processes

_HERE = Path(__file__).parent
_FOLDER = Path("/tmp", f"torchx-monarch-clusters-{os.getuid()}")
_UP_WITHIN = 900.0  # it may have to be installed, or built
_DOWN_WITHIN = 120.0


def _record(name: str) -> Path:
    return _FOLDER / f"{name}.json"


def _holder(name: str) -> processes.ProcessIdentity | None:
    """The process that holds a cluster; None when there is none."""
    record = state_files.load_undamaged(dict, str(_record(name))) or {}
    if not record:
        return None
    wanted = processes.ProcessIdentity(record["pid"], record["start"])
    return wanted if processes.identity(wanted.pid) == wanted else None


def up(name: str) -> int:
    """Start it, unless it is there; print its variables."""
    if _holder(name) is None:
        _FOLDER.mkdir(mode=0o700, exist_ok=True)
        _record(name).unlink(missing_ok=True)
        log = _FOLDER / f"{name}.log"
        with open(log, "wb") as file:
            words = [sys.executable, "-m", "tests.clusters", "hold", name]
            holder = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)
        until = time.monotonic() + _UP_WITHIN
        while not _record(name).exists():
            if holder.poll() is not None or time.monotonic() > until:
                holder.terminate()
                print(f"{name} did not come up:\n{log.read_text()[-3000:]}", file=sys.stderr)
                return 1
            time.sleep(0.1)
    for variable, value in json.loads(_record(name).read_text())["variables"].items():
        print(f"export {variable}={shlex.quote(value)}")
    return 0


def hold(name: str) -> int:
    """Start it, and end it when told to."""

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(1)

    signal.signal(signal.SIGTERM, end)
    me = processes.identity(os.getpid())
    assert me is not None
    try:
        with importlib.import_module(f"tests.clusters.{name}.by_hand").running() as variables:
            state_files.write_json(str(_record(name)), {"pid": me.pid, "start": me.start, "variables": variables})
            while True:
                signal.pause()
    finally:
        _record(name).unlink(missing_ok=True)


def down(name: str) -> int:
    """End it, if it is there."""
    holder = _holder(name)
    if holder is None:
        return 0
    processes.send(holder, signal.SIGTERM)
    until = time.monotonic() + _DOWN_WITHIN
    while processes.identity(holder.pid) == holder:
        if time.monotonic() > until:
            print(f"{name} still runs after {_DOWN_WITHIN:g} s (process {holder.pid})", file=sys.stderr)
            return 1
        time.sleep(0.1)
    return 0


def main() -> int:
    names = sorted(path.parent.name for path in _HERE.glob("*/by_hand.py"))
    verbs = {"up": up, "down": down, "hold": hold}
    if len(sys.argv) != 3 or sys.argv[1] not in verbs or sys.argv[2] not in names:
        print(f"usage: python -m tests.clusters up|down {'|'.join(names)}", file=sys.stderr)
        return 2
    return verbs[sys.argv[1]](sys.argv[2])


if __name__ == "__main__":
    sys.exit(main())
