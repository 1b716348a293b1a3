# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Processes: which one is meant, who belongs to whom, and how to end all of them.

A pid alone names nothing for long: pids are used again. A process is named by its pid and its start time. A process
belongs to an app when it descends from one that does, or carries the app's marker in its environment: the marker finds
those whose ancestors are dead.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

#: The environment variable that marks every process of an app.
MARKER = "MONARCH_JOB"
#: The module whose processes end their own children when they get SIGTERM.
HOST_MODULE = b"torchx_monarch.host"

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def raise_file_limit() -> tuple[int, int] | None:
    """Let this process have as many files open as it may; it holds several for each of its children.

    Returns:
        The limit that it was given, which its children should get: programs that use select() break with more. None
        when there was nothing to raise.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return None
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft, hard


def become_subreaper() -> None:
    """From now on, orphans among this process' descendants become its children."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def ignore_signals(numbers: Iterable[int]) -> None:
    """Ignore signals in a thread that is not the main one, where Python's own ``signal.signal`` refuses."""
    function = _libc.signal
    function.argtypes, function.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    for number in numbers:
        function(number, int(signal.SIG_IGN))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent thread ends; exit now when the parent is not ``parent``."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


class Identity(NamedTuple):
    """A process: pid, and start time in clock ticks since boot."""

    pid: int
    start: int


class Process(NamedTuple):
    pid: int
    parent: int
    state: str
    start: int


def process(pid: int) -> Process | None:
    """What /proc says about a pid; None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    # The second field is the name in brackets, which may itself hold blanks and brackets.
    fields = text[text.rindex(b")") + 2 :].split()
    return Process(pid, int(fields[1]), fields[0].decode(), int(fields[19]))


def identity(pid: int) -> Identity | None:
    """The identity of a living process (a zombie is not living); None when there is none of this pid."""
    found = _living(pid)
    return Identity(pid, found.start) if found else None


def send(target: Identity, signum: int) -> bool:
    """Signal exactly this process, never another that has got its pid; False when it is gone."""
    try:
        fd = os.pidfd_open(target.pid)
    except (AttributeError, OSError):  # a Python or a kernel without pidfds, or no such process
        if identity(target.pid) != target:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(target.pid, signum)
            return True
        return False
    try:
        # The descriptor holds the process: if it is the right one now, it stays the right one.
        if identity(target.pid) != target:
            return False
        signal.pidfd_send_signal(fd, signum)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


def _pids() -> Iterable[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _variables(pid: int) -> list[bytes]:
    """The environment a process was started with; empty when it may not be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def _carries(pid: int, marks: Iterable[bytes]) -> bool:
    variables = _variables(pid)
    return all(mark in variables for mark in marks)


def mark(name: str, value: str) -> bytes:
    """The form in which an environment variable stands in /proc/PID/environ."""
    return os.fsencode(f"{name}={value}")


def marked(job: str) -> list[int]:
    """Every living process with this app's marker, but not the calling one."""
    wanted = [mark(MARKER, job)]
    return [pid for pid in _pids() if pid != os.getpid() and _carries(pid, wanted) and identity(pid)]


def running_script(script: str) -> list[tuple[Identity, str]]:
    """The living processes of this user that run a certain Python script, each with the script's first argument.

    Args:
        script: how the path of the script ends.
    """
    path = os.fsencode(script)
    found = []
    for pid in _pids():
        words = _command(pid)
        at = next((index for index, word in enumerate(words[:-1]) if word.endswith(path)), None)
        with contextlib.suppress(OSError):
            if at is not None and os.stat(f"/proc/{pid}").st_uid == os.geteuid() and (one := identity(pid)):
                found.append((one, os.fsdecode(words[at + 1])))
    return found


def _families() -> Callable[[int], list[int]]:
    """What tells the living children of a process."""
    if os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return _listed_children
    # A kernel without CONFIG_PROC_CHILDREN: all processes of the machine have to be looked at, once.
    children: dict[int, list[int]] = {}
    for pid in _pids():
        if found := _living(pid):
            children.setdefault(found.parent, []).append(pid)
    return lambda pid: children.get(pid, [])


def _listed_children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            # A thread may end meanwhile; its children are then another's, at which whoever looks again finds them.
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return [child for child in found if _living(child)]


def _living(pid: int) -> Process | None:
    found = process(pid)
    return found if found is not None and found.state not in "ZX" else None


def descendants(root: int, job: str) -> list[int]:
    """The living descendants of a process, elders first, without those that belong to another app.

    An app that was submitted from within this one is an app of its own: its keeper is a descendant, and is left alone.
    """
    children_of = _families()
    foreign = MARKER.encode() + b"="
    own = mark(MARKER, job)
    found: list[int] = []
    queue = children_of(root)
    while queue:
        pid = queue.pop(0)
        markers = [variable for variable in _variables(pid) if variable.startswith(foreign)]
        if markers and own not in markers:
            continue
        found.append(pid)
        queue += children_of(pid)
    return found


def adopted(marks: Iterable[bytes]) -> list[int]:
    """The children of this process that carry all these marks: its own, and orphans that it has taken in."""
    marks = list(marks)
    return [pid for pid in _families()(os.getpid()) if _carries(pid, marks)]


def hosts(roots: Iterable[int]) -> dict[int, list[int]]:
    """For each process, the topmost host processes at or below it.

    A host ends its own family in good order, and forks of a host share its command line: only the topmost is to be
    told.
    """
    children_of = _families()
    found: dict[int, list[int]] = {}
    for root in roots:
        found[root] = []
        queue = [root]
        while queue:
            pid = queue.pop(0)
            if is_host(_command(pid)):
                found[root].append(pid)
            else:
                queue += children_of(pid)
    return found


def is_host(command: Sequence[bytes]) -> bool:
    """Whether this is ``python [flags] -m HOST_MODULE ...``, and not a command that has such words as arguments."""
    words = iter(command)
    if not os.path.basename(next(words, b"")).startswith(b"python"):
        return False
    for word in words:
        if word == b"-m":
            return next(words, b"") == HOST_MODULE
        if word in (b"-X", b"-W"):
            next(words, b"")
        elif word == b"-c" or not word.startswith(b"-"):
            return False
    return False


def _command(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def kill(pids: Iterable[int]) -> None:
    """SIGKILL each; those that are gone already are fine."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def kill_until_gone(find: Callable[[], list[int]], timeout: float = 5.0) -> list[int]:
    """SIGKILL what ``find`` finds until it finds nothing: families may still grow while they are being killed.

    Returns:
        Those that live on after ``timeout`` seconds (in an uninterruptible wait, say).
    """
    deadline = time.monotonic() + timeout
    pause = 0.001
    # Twice: a list of children may miss one when another leaves it at that moment.
    while found := find() or find():
        kill(found)
        if time.monotonic() > deadline:
            return found
        time.sleep(pause)
        pause = min(pause * 2, 0.02)
    return []


def reap(on_exit: Callable[[int, int], None] = lambda pid, code: None) -> bool:
    """Collect every child that has ended, calling ``on_exit(pid, exit code)``; -N is the code of signal N.

    Returns:
        Whether this process still has children.
    """
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        on_exit(pid, os.waitstatus_to_exitcode(status))


def dead_children() -> set[int]:
    """The children of this process that have ended and that nobody has collected."""
    found = (process(pid) for pid in _pids())
    return {one.pid for one in found if one is not None and one.parent == os.getpid() and one.state in "ZX"}


def kill_descendants(job: str, timeout: float = 5.0) -> list[int]:
    """End everything of the app below this process, however it has tried to get away, and collect it.

    Returns:
        Those that could not be ended within ``timeout`` seconds.
    """

    def find() -> list[int]:
        # Orphans become children of this process, so when it has no child there is no descendant.
        return descendants(os.getpid(), job) if reap() else []

    return kill_until_gone(find, timeout)
