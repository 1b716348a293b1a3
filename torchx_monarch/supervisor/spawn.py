# SPDX-License-Identifier: BSD-3-Clause
"""Start a process in a clean state: in a new session, with default signals, killed when its parent ends."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Mapping, Sequence

from torchx_monarch.system import processes

#: Signals that the supervisor or the submitter's shell may ignore; a child would inherit that.
_RESET = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGPIPE,
    signal.SIGCHLD,
    signal.SIGXFSZ,
)


#: The limit on open files before this process raised it; None if it did not.
_given_files: tuple[int, int] | None = None


def raise_file_limit() -> None:
    """Raise this process' limit on open files as far as allowed; processes that it starts get the previous limit."""
    global _given_files
    _given_files = processes.raise_file_limit()


class SpawnError(OSError):
    """Raised when a command cannot be started; the text is one complete sentence."""


def find_program(name: str, path: str, cwd: str) -> str:
    """Return the path of a command's program: the first match on PATH, then in the working directory.

    Raises:
        SpawnError: the program does not exist, or is not executable.
    """
    folders = [] if "/" in name else [folder or "." for folder in path.split(os.pathsep)]
    candidates = [os.path.join(cwd, folder, name) for folder in (*folders, "")]
    present = [candidate for candidate in candidates if os.path.isfile(candidate)]
    for candidate in present:
        if os.access(candidate, os.X_OK):
            return candidate
    if present:
        raise SpawnError(
            errno.EACCES, f"{present[0]} is not executable. Run chmod +x on it, or start it with its interpreter."
        )
    if "/" in name:
        raise SpawnError(errno.ENOENT, f"the program {candidates[0]} does not exist.")
    raise SpawnError(errno.ENOENT, f"the program {name!r} is neither on the PATH ({path}) nor in {cwd}.")


def spawn(argv: Sequence[str], env: Mapping[str, str], cwd: str) -> tuple[int, tuple[int, int]]:
    """Start a process; return its pid when it runs its program, and the read ends of its stdout and stderr.

    It leads a new session, reads /dev/null, has default signals, and is killed when the calling thread ends.

    Raises:
        SpawnError: the program or the working directory cannot be used.
        OSError: the system refuses another process or another pipe.
    """
    if not os.path.isdir(cwd):
        raise SpawnError(errno.ENOENT, f"the working directory {cwd} does not exist.")
    program = find_program(argv[0], env.get("PATH", os.defpath), cwd)
    parent = os.getpid()
    opened = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)]
    try:
        for _ in range(3):
            opened += os.pipe()
        null, stdout, stdout_end, stderr, stderr_end, failed, report = opened
        # Block signals: a handler in the child would write to the wake-up pipe that it shares with its parent.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
            if pid == 0:
                _become(program, argv, env, cwd, (null, stdout_end, stderr_end), parent, report)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(opened.pop())  # report
        # End of file without data means that exec() has closed the write end.
        if error := os.read(failed, 8192):
            os.waitpid(pid, 0)
            number, _, what = error.decode(errors="surrogateescape").partition(" ")
            raise SpawnError(int(number), f"{what}: {os.strerror(int(number))}.")
        opened = [null, stdout_end, stderr_end, failed]
        return pid, (stdout, stderr)
    finally:
        for fd in opened:
            os.close(fd)


def _become(
    program: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    streams: tuple[int, int, int],
    parent: int,
    report: int,
) -> None:
    """Set up the child process and run the program. Never returns."""
    refused = "a process cannot be set up"
    try:
        os.setsid()
        processes.die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        for signum in _RESET:
            signal.signal(signum, signal.SIG_DFL)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        refused = f"the working directory {cwd} cannot be entered"
        os.chdir(cwd)
        refused = f"{program} cannot be executed"
        if _given_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, _given_files)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execve(program, list(argv), env)
    except OSError as e:
        os.write(report, f"{e.errno} {refused}".encode(errors="surrogateescape"))
    finally:
        os._exit(127)
