# SPDX-License-Identifier: BSD-3-Clause
"""Read from /proc what a process is doing, and how it handles a signal, without interrupting it."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from torchx_monarch.system.untrusted_text import one_line

_DESCRIPTOR_CALLS = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "ioctl": (16, 29),
    "pread": (17, 67),
    "pwrite": (18, 68),
    "readv": (19, 65),
    "writev": (20, 66),
    "connect": (42, 203),
    "accept": (43, 202),
    "sendto": (44, 206),
    "recvfrom": (45, 207),
    "sendmsg": (46, 211),
    "recvmsg": (47, 212),
    "fcntl": (72, 25),
    "flock": (73, 32),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "getdents64": (217, 61),
    "preadv": (295, 69),
    "pwritev": (296, 70),
    "preadv2": (327, 286),
    "pwritev2": (328, 287),
}
"""The system calls whose first argument is the descriptor of the file that they may wait for, with their numbers on
x86_64 and aarch64."""

_PATH_CALLS = {"openat": (257, 56), "stat": (262, 79), "statx": (332, 291)}
"""Those whose second argument is the address of a path."""

_OTHER_CALLS = {"futex": (202, 98)}

_NAMES = {
    machine: {numbers[place]: name for name, numbers in {**_DESCRIPTOR_CALLS, **_PATH_CALLS, **_OTHER_CALLS}.items()}
    for place, machine in enumerate(("x86_64", "aarch64"))
}

_MAX_PATH = 300


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
    name, path = system_call(pid)
    said = [f"{name} of {path}"] if path else []
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan") as file:
        said += [f"in {function}"] if (function := file.read().strip()) not in ("", "0") else []
    return ", ".join(said)


def system_call(pid: int) -> tuple[str, str]:
    """Return the name of the system call in which the main thread waits, and its file; empty if that is not known."""
    name = ""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{pid}/syscall") as file:
            number, first, second = file.read().split()[:3]
        name = _NAMES.get(os.uname().machine, {}).get(int(number), "")
        if name in _DESCRIPTOR_CALLS:
            return name, one_line(os.readlink(f"/proc/{pid}/fd/{int(first, 16)}"), _MAX_PATH)
        if name in _PATH_CALLS:
            with open(f"/proc/{pid}/mem", "rb", 0) as memory:
                memory.seek(int(second, 16))
                path = memory.read(_MAX_PATH).partition(b"\0")[0].decode(errors="replace")
            return name, one_line(os.path.join(os.readlink(f"/proc/{pid}/cwd"), path), _MAX_PATH)
    return name, ""


def seconds_runnable(pid: int) -> float:
    """Return for how many seconds the main thread of a process could have run, and had no processor; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/schedstat") as file:
        return int(file.read().split()[1]) / 1e9
    return 0.0


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
