# SPDX-License-Identifier: BSD-3-Clause
"""Read from /proc what a process is doing, and how it handles a signal, without interrupting it."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from torchx_monarch.system.untrusted_text import one_line

_DESCRIPTOR_CALLS = {
    "x86_64": {0: "read", 1: "write", 3: "close", 16: "ioctl", 17: "pread", 18: "pwrite", 74: "fsync", 75: "fdatasync"},
    "aarch64": {29: "ioctl", 57: "close", 63: "read", 64: "write", 67: "pread", 68: "pwrite", 82: "fsync"},
}
"""The system calls by number whose first argument is the descriptor of the file that they may wait for."""


class KernelStatus(NamedTuple):
    """What /proc/PID/status says of a process, or of one of its threads.

    Attributes:
        name: name of the program, or that which the process has given itself; at most 15 characters, of any kind.
        state: ``R`` running, ``S`` sleeping, ``D`` uninterruptible, ``T`` stopped, ``t`` traced, ``Z`` zombie, ….
        caught: the signals that have a handler, as a mask.
        blocked: the signals that the thread blocks, as a mask.
        pending: the signals that wait for the thread or for its process, as a mask.
        switches: how often the thread has left the processor: as often as before if it has waited since.
    """

    name: str
    state: str
    caught: int
    blocked: int
    pending: int
    switches: int


def status(pid: int, thread: int | None = None) -> KernelStatus | None:
    """Return the status of a process (of its main thread), or of one of its threads; None if it is gone."""
    path = f"/proc/{pid}/status" if thread is None else f"/proc/{pid}/task/{thread}/status"
    try:
        with open(path, errors="replace") as file:
            text = file.read()
    except OSError:
        return None
    fields = dict(line.partition(":\t")[::2] for line in text.splitlines())
    if "State" not in fields:
        return None

    def mask(name: str) -> int:
        return int(fields.get(name) or "0", 16)

    pending = mask("SigPnd") | mask("ShdPnd")
    switches = sum(int(fields.get(f"{kind}_ctxt_switches") or 0) for kind in ("voluntary", "nonvoluntary"))
    return KernelStatus(fields["Name"], fields["State"][:1], mask("SigCgt"), mask("SigBlk"), pending, switches)


def kernel_wait(pid: int) -> str:
    """Say where the main thread of a process waits inside the kernel: ``write of /mnt/x.pt, in rpc_wait_bit``.

    Only a call with a descriptor tells its file. Empty if the kernel does not tell anything.
    """
    said = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{pid}/syscall") as file:
            number, argument = file.read().split()[:2]
        if name := _DESCRIPTOR_CALLS.get(os.uname().machine, {}).get(int(number)):
            said.append(f"{name} of {one_line(os.readlink(f'/proc/{pid}/fd/{int(argument, 16)}'))}")
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan") as file:
        said += [f"in {function}"] if (function := file.read().strip()) not in ("", "0") else []
    return ", ".join(said)


def threads(pid: int) -> list[int]:
    """Return the ids of the threads of a process; none if it is gone."""
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    return []


def blocking(pid: int, signum: int) -> set[int]:
    """Return the threads of a process that block a signal. A thread that executes its handler blocks it, too."""
    bit = 1 << signum - 1
    found = ((thread, status(pid, thread)) for thread in threads(pid))
    return {thread for thread, thread_status in found if thread_status is not None and thread_status.blocked & bit}


def has_open(pid: int, descriptor: int) -> bool:
    """Return whether a process has the file of one of our descriptors open; False if that may not be read."""
    ours = os.fstat(descriptor)
    with contextlib.suppress(OSError):
        # From the highest number: ``rank_main`` gives the file the highest one.
        for name in sorted(os.listdir(f"/proc/{pid}/fd"), key=int, reverse=True):
            with contextlib.suppress(OSError):
                theirs = os.stat(f"/proc/{pid}/fd/{name}")
                if (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino):
                    return True
    return False
