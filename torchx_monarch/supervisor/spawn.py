# SPDX-License-Identifier: BSD-3-Clause
"""Start a process in a clean state: in a new session, with default signals, killed when its parent ends."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
from collections.abc import Mapping, Sequence

from torchx_monarch.system import processes

#: The limit on open files before this process raised it; None if it did not.
_given_files: tuple[int, int] | None = None


def raise_file_limit() -> None:
    """Raise this process' limit on open files as far as allowed; processes that it starts get the previous limit."""
    global _given_files
    _given_files = processes.raise_file_limit()


class SpawnError(OSError):
    """Raised when a command cannot be started; the text is one complete sentence."""


def find_program(name: str, path: str, cwd: str) -> str:
    """Return the path of a command's program: the first match on PATH, then in the working directory."""
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
    stdout, stdout_end = os.pipe()
    try:
        stderr, stderr_end = os.pipe()
    except OSError:
        os.close(stdout)
        os.close(stdout_end)
        raise
    # Block signals: a handler in the child would write to the wake-up pipe that it shares with its parent.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        process = subprocess.Popen(
            argv,
            executable=program,
            stdin=subprocess.DEVNULL,
            stdout=stdout_end,
            stderr=stderr_end,
            env=env,
            cwd=cwd,
            start_new_session=True,
            close_fds=False,  # a batch system may give its tasks descriptors (PMI_FD); Python's own are not inheritable
            preexec_fn=lambda: _set_up_child(parent),
        )
    except BaseException as error:
        os.close(stdout)
        os.close(stderr)
        if not isinstance(error, OSError) or error.filename not in (program, cwd) or error.errno is None:
            raise
        refused = f"the working directory {cwd} cannot be entered"
        refused = refused if error.filename == cwd else f"{program} cannot be executed"
        raise SpawnError(error.errno, f"{refused}: {os.strerror(error.errno)}.") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(stdout_end)
        os.close(stderr_end)
    process.returncode = 0  # the caller reaps its children; without this, Popen would reap some of them
    return process.pid, (stdout, stderr)


def _set_up_child(parent: int) -> None:
    processes.die_with_parent(parent)
    signal.set_wakeup_fd(-1)
    # What the supervisor or the submitter's shell may ignore: a child inherits that.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    if _given_files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, _given_files)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
