# SPDX-License-Identifier: BSD-3-Clause
"""What somebody on the machine might do to a job: ``python -m tests.local.other_user knock|intrude NAME [TIMES]``.

``knock`` connects so many times to the abstract unix socket NAME and prints how many connections were closed at once
and how many stayed open. ``intrude`` has Monarch run code in the process that listens there, and prints as whom it ran.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from pathlib import Path

import pytest

_CLOSED_WITHIN = 3.0
_ANSWERED_WITHIN = 6.0

_SERVICE = "1" * 10
"""An id as worker loops have it; since Monarch 0.8 an address without one is refused before anything is sent."""

_OTHER_USER = 65534

# Of another user, but one who may read Python and this repository, wherever they are.
AS_OTHER_USER = (
    *("setpriv", f"--reuid={_OTHER_USER}", f"--regid={_OTHER_USER}", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
)


def missing() -> str:
    """Why nobody else can be played here; empty when he can."""
    if os.geteuid() != 0:
        return "to be another user one must be root"
    return "" if shutil.which("setpriv") else "no `setpriv` (Debian: util-linux)"


# In CI a machine without is a mistake, and the tests say so by failing.
requires_other_user = pytest.mark.skipif(bool(missing()) and "CI" not in os.environ, reason=missing() or "-")


def abstract_sockets(pid: int) -> list[str]:
    """Names, without the ``@``, of the abstract unix sockets that a process listens on."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(descriptor))
        except FileNotFoundError:
            continue
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    listening = [row for row in rows if len(row) > 7 and row[3] == "00010000" and f"socket:[{row[6]}]" in inodes]
    return [row[7][1:] for row in listening if row[7].startswith("@")]


def knock(name: str, times: int) -> None:
    """See above."""
    closed = 0
    for _ in range(times):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_CLOSED_WITHIN)
            connection.connect(f"\0{name}")
            try:
                closed += connection.recv(1) == b""
            except ConnectionResetError:
                closed += 1
            except TimeoutError:
                pass
    print(closed, times - closed)


def intrude(name: str) -> None:
    """See above."""
    from monarch.actor import Actor, attach_to_workers, endpoint

    class Intruder(Actor):  # type: ignore[misc]
        @endpoint
        def user(self) -> int:
            return os.geteuid()

    try:
        address = f"service<{_SERVICE}>@ipc://@{name}"
        hosts = attach_to_workers(ca="trust_all_connections", workers=[address], name="strange")
        hosts.initialized.get(timeout=_ANSWERED_WITHIN)
        intruder = hosts.spawn_procs(per_host={"gpus": 1}, name="intruders").spawn("intruder", Intruder)
        print("ran as", intruder.user.call_one().get(timeout=_ANSWERED_WITHIN), flush=True)
    except (Exception, KeyboardInterrupt) as error:  # Monarch interrupts for what it cannot deliver
        print("refused", type(error).__name__, error, flush=True)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "knock":
        knock(sys.argv[2], int(sys.argv[3]))
    else:
        intrude(sys.argv[2])
