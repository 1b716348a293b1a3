# SPDX-License-Identifier: BSD-3-Clause
"""Identify processes, decide to which app they belong, and end them.

A pid alone does not identify a process, because the kernel reuses pids: a pid and a start time do. A process belongs to
an app if it descends from a process of the app, or has the app's marker in its environment. The marker identifies
processes whose ancestors are dead.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import resource
import select
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

#: The environment variable that marks every process of an app.
MARKER = "MONARCH_JOB"
_HOST = re.compile(rb"(?:[^\0]*/)?python[^\0/]*\0(?:-[XW]\0[^\0]*\0|-[^cm\0][^\0]*\0)*-m\0torchx_monarch\.host(?:\0|$)")
"""The command line of a host process: ``python [flags] -m torchx_monarch.host``, not one with such arguments."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")

_KILL_TIMEOUT = 5.0
"""Seconds after which a process that has got SIGKILL is given up."""

_MAX_STRING = 128 * 1024
"""The maximum bytes of one argument or variable of a process with its NUL: MAX_ARG_STRLEN with pages of 4 KiB."""

_MAX_STRINGS = 6 * 1024 * 1024
"""The maximum bytes of all of them, however large its stack may be (execve(2)); 2 MiB with a stack of 8 MiB."""

_TERM_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL for processes that are left behind."""

DAEMONS_PATIENCE = 4.0
"""Seconds for them to end by themselves: ``torch_shm_manager``, which removes shared memory, takes 2 s."""


given_files: tuple[int, int] | None = None
"""The limit on open files that this process had before ``raise_file_limit``, soft and hard; None if it is the same.

Children get it back: programs that use select() fail with more files.
"""


def raise_file_limit() -> None:
    """Raise the limit on open files as far as allowed: this process holds several files for each of its children."""
    global given_files
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        given_files = soft, hard


def limit_hint(error: BaseException) -> str:
    """Return what to add to an error that a limit on open files or processes has caused; empty for any other error."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EMFILE:
        return f" (RLIMIT_NOFILE is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}: ulimit -n)"
    if number == errno.EAGAIN or str(error) == "can't start new thread":  # a RuntimeError
        return " (the limit of processes: ulimit -u, or pids.max of the container)"
    return " (the limit of the whole machine, fs.file-max)" if number == errno.ENFILE else ""


def why_too_large(words: Iterable[str], environ: Mapping[str, str]) -> str:
    """Return why no process can have these arguments and variables, which ``execve`` limits; empty if one can."""
    named = [(f"argument {word[:40]!r}…", word) for word in words]
    named += [(f"variable {name[:200]!r}", f"{name}={value}") for name, value in environ.items()]
    sizes = sorted((len(text.encode(errors="replace")) + 1, name) for name, text in named)
    for size, largest in sizes[-1:]:
        if size > _MAX_STRING:
            return f"{largest} has {size:,} bytes, and a process can have none above {_MAX_STRING:,}"
        if (total := sum(size for size, _ in sizes)) > _MAX_STRINGS:
            of_all = f"arguments and variables have {total:,} bytes, and a process can have {_MAX_STRINGS:,}"
            return f"{of_all} at most; the largest is {largest} with {size:,}"
    return ""


_inherited: frozenset[ProcessIdentity | None] = frozenset()


def become_subreaper() -> None:
    """Make orphans among this process' descendants its children from now on.

    Children that it has already do not count as its descendants: in ``bash -c 'torchrun train.py > >(sed …)'`` bash
    starts sed, and becomes torchrun. They are left alone.
    """
    global _inherited
    _inherited = frozenset(map(identity, _families()(os.getpid())))
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent thread ends; exit now if the parent is not ``parent``."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def spawn(argv: Sequence[str], env: Mapping[str, str], cwd: str, **streams: Any) -> subprocess.Popen[bytes]:
    """Start a process, and return when it runs its program. The caller reaps it.

    It leads a new session, has default signals and the limit on open files that this process was given, and is killed
    when the calling thread ends. The first word is looked up on the PATH of ``env``, then in ``cwd``.

    Args:
        streams: ``stdin``, ``stdout`` and ``stderr`` as for ``subprocess.Popen``.

    Raises:
        OSError: it cannot be started.
        ValueError: a word contains a null byte.
    """
    program, parent = _find_program(argv[0], env.get("PATH", os.defpath), cwd), os.getpid()
    # Block signals: a handler in the child would write to the wake-up pipe that it shares with its parent.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        process = subprocess.Popen(
            argv,
            bufsize=0,
            executable=program,
            env=env,
            cwd=cwd,
            start_new_session=True,
            close_fds=False,  # a batch system may give its tasks descriptors (PMI_FD); Python's own are not inheritable
            preexec_fn=lambda: _set_up_child(parent),
            **streams,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    process.returncode = 0  # without this, Popen would reap some of the caller's children
    return process


def _find_program(name: str, path: str, cwd: str) -> str:
    for folder in () if "/" in name else path.split(os.pathsep):
        candidate = os.path.join(cwd, folder, name)
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return candidate
    own = os.path.join(cwd, name)
    return own if os.path.exists(own) else name  # the error names what the user has typed


def _set_up_child(parent: int) -> None:
    die_with_parent(parent)
    signal.set_wakeup_fd(-1)
    # What the supervisor or the submitter's shell may ignore: a child inherits that.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    if given_files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, given_files)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


@dataclass(frozen=True)
class ProcessIdentity:
    """The identity of a process: pid, and start time in clock ticks since boot."""

    pid: int
    start: int


class Process(NamedTuple):
    """A process as /proc/PID/stat describes it.

    Attributes:
        start: start time in clock ticks since boot.
        cpu_seconds: processor time of the process and of its children that have ended.
        rss_bytes: its resident memory, with what it shares with other processes.
    """

    pid: int
    parent: int
    group: int
    state: str
    start: int
    cpu_seconds: float
    rss_bytes: int


def process(pid: int) -> Process | None:
    """Read the state of a process from /proc; None if the pid is not in use."""
    text = _read(pid, "stat")
    if not text:
        return None
    # The second field is the command name in parentheses, which may itself contain blanks and parentheses.
    fields = text[text.rindex(b")") + 2 :].split()
    used = sum(map(int, fields[11:15])) / _TICKS
    rss = int(fields[21]) * _PAGE
    return Process(pid, int(fields[1]), int(fields[2]), fields[0].decode(), int(fields[19]), used, rss)


def _read(pid: int, name: str) -> bytes:
    """Read a file of /proc/PID; empty if the process is gone, or the file may not be read."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


def identity(pid: int) -> ProcessIdentity | None:
    """Return the identity of a living process; None if no process has this pid, or it is a zombie."""
    found = _living(pid)
    return ProcessIdentity(pid, found.start) if found else None


def send(target: ProcessIdentity, signum: int) -> bool:
    """Signal this process, not another one with the same pid; return False if it has ended."""
    with contextlib.suppress(ProcessLookupError):
        if identity(target.pid) == target:
            os.kill(target.pid, signum)
            return True
    return False


def await_exit(target: ProcessIdentity, seconds: float) -> bool:
    """Wait for the exit of this process, at most so many seconds; return False at once if it has exited already."""
    try:
        descriptor = os.pidfd_open(target.pid)
    except OSError:  # it has exited; or a sandbox lacks the call (gVisor), as kernels before 5.3 do
        return False
    try:
        if identity(target.pid) != target:
            return False
        waits = select.poll()
        waits.register(descriptor, select.POLLIN)
        waits.poll(seconds * 1000)
        return True
    finally:
        os.close(descriptor)


def _pids() -> Iterable[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _variables(pid: int) -> list[bytes]:
    """Return the environment with which a process was started; no variable if it may not be read."""
    return _read(pid, "environ").split(b"\0")


def _carries(pid: int, marks: Iterable[bytes]) -> bool:
    variables = _variables(pid)
    return all(mark in variables for mark in marks)


def mark(name: str, value: str) -> bytes:
    """Return an environment variable in the form that /proc/PID/environ shows."""
    return os.fsencode(f"{name}={value}")


def marked(job: str) -> list[int]:
    """Return all living processes with this app's marker, except the calling one."""
    wanted = [mark(MARKER, job)]
    return [pid for pid in _pids() if pid != os.getpid() and _carries(pid, wanted) and identity(pid)]


def _families() -> Callable[[int], list[int]]:
    # Without CONFIG_PROC_CHILDREN the kernel lists none.
    return _listed_children if os.path.exists(f"/proc/self/task/{os.getpid()}/children") else children()


def children() -> Callable[[int], list[int]]:
    """Read all processes of the machine once; return a function that lists the living children of a process."""
    found: dict[int, list[int]] = {}
    for pid in _pids():
        if living := _living(pid):
            found.setdefault(living.parent, []).append(pid)
    return lambda pid: found.get(pid, [])


def _listed_children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            # A thread may end meanwhile. Another thread then gets its children, and the caller's next scan lists them.
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return [child for child in found if _living(child)]


def _living(pid: int) -> Process | None:
    found = process(pid)
    return found if found is not None and found.state not in "ZX" else None


def descendants(
    root: int, job: str, children_of: Callable[[int], list[int]] | None = None, without: Collection[int] = ()
) -> list[int]:
    """Return the living descendants of a process, parents before children, without those that belong to another app.

    An app that was submitted from inside this one is separate: its supervisor is a descendant, but is left alone.
    ``without`` are processes that are left out, with their descendants.
    """
    children_of = children_of or _families()
    foreign = MARKER.encode() + b"="
    own = mark(MARKER, job)
    found: list[int] = []
    queue = children_of(root)
    while queue:
        pid = queue.pop(0)
        if pid in without or (_inherited and identity(pid) in _inherited):
            continue
        markers = [variable for variable in _variables(pid) if variable.startswith(foreign)]
        if markers and own not in markers:
            continue
        found.append(pid)
        queue += children_of(pid)
    return found


def adopted(marks: Iterable[bytes]) -> list[int]:
    """Return the children of this process that carry all these marks, among them orphans that it has adopted."""
    marks = list(marks)
    return [pid for pid in _families()(os.getpid()) if _carries(pid, marks)]


def hosts(roots: Iterable[int]) -> dict[int, list[int]]:
    """Return, for each process, the topmost host processes at or below it.

    Only these need a signal: a host ends its own descendants when it gets SIGTERM. Its forks have its command line.
    """
    children_of = _families()
    found: dict[int, list[int]] = {}
    for root in roots:
        found[root] = []
        queue = [root]
        while queue:
            pid = queue.pop(0)
            if _HOST.match(_read(pid, "cmdline")):
                found[root].append(pid)
            else:
                queue += children_of(pid)
    return found


def kill(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    """Send a signal to each process; ignore those that have ended already."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def end(find: Callable[[], list[int]], patience: float | None) -> Iterator[float]:
    """End the processes that ``find`` returns, and those that they start meanwhile.

    They have ``patience`` seconds to end by themselves, get SIGTERM, and SIGKILL 2 s later; at once for None.

    Yields:
        Seconds that the caller must wait before it continues. In the end those are left that SIGKILL does not end (in
        an uninterruptible wait, say).
    """
    stages = () if patience is None else ((0, patience), (signal.SIGTERM, _TERM_GRACE))
    for number, seconds in (*stages, (signal.SIGKILL, _KILL_TIMEOUT)):
        until, pause, is_due = time.monotonic() + seconds, 0.001, number != 0
        # Call find() twice: a list of children may miss one child while another leaves the list.
        while left := find() or find():
            if is_due:
                kill(left, number)
            is_due = number == signal.SIGKILL
            if time.monotonic() > until:
                break
            yield pause
            pause = min(2 * pause, 0.02)
        else:
            return


def kill_until_gone(find: Callable[[], list[int]]) -> list[int]:
    """Kill what ``find`` returns until it returns nothing; return those still alive after ``_KILL_TIMEOUT`` seconds."""
    for pause in end(find, None):
        time.sleep(pause)
    return find()


def reap(on_exit: Callable[[int, int], None] = lambda pid, code: None) -> bool:
    """Collect all children that have ended, with ``on_exit(pid, code)`` (-N for signal N); return whether some live."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        on_exit(pid, os.waitstatus_to_exitcode(status))


def own_descendants(job: str) -> list[int]:
    """Collect the children of this process, a subreaper, that have ended; return its descendants with this marker."""
    return descendants(os.getpid(), job) if reap() else []


def watch_signals(numbers: Iterable[int]) -> int:
    """Have the number of each of these signals written to a pipe as one byte; return its non-blocking read end."""
    wake, signalled = os.pipe()
    for end in (wake, signalled):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    return wake


def user_name() -> str:
    """Return the user's name; ``uid1234`` for a user without one, as in a container of OpenShift."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):  # KeyError before Python 3.13
        return f"uid{os.getuid()}"
