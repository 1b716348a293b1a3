# SPDX-License-Identifier: BSD-3-Clause
"""Record which processes own an app (supervisor.json), and hold a lock on the app's folder while they do.

The submitter makes the lock before the folder has its name; keeper and supervisor inherit it. The kernel releases it
with the last of them, however they end. It is an ``flock``: unlike a POSIX lock it is inherited, and a reader's test of
it takes nothing away. Containers on one machine see it. So do machines that share the folder over NFS (Linux sends it
to the server as a lock of the whole file) or another file system with such locks.
"""

from __future__ import annotations

import errno
import fcntl
import os
from dataclasses import dataclass
from typing import Any

from torchx_monarch.backends.core import state_files
from torchx_monarch.system import safe_files
from torchx_monarch.system.processes import ProcessIdentity


@dataclass(frozen=True)
class Owners:
    """The content of supervisor.json: the processes that own an app.

    Attributes:
        hostname: the name of their machine or container.
        keeper: the process that records the app's end if the supervisor dies.
        supervisor: the process that runs the app.
    """

    hostname: str
    keeper: ProcessIdentity
    supervisor: ProcessIdentity

    @property
    def is_here(self) -> bool:
        """Whether they run on this machine, by its name. On another one they may live though their lock is not seen."""
        return self.hostname == os.uname().nodename

    def to_json(self) -> dict[str, Any]:
        # asdict() leaves named tuples as they are, and JSON would write them as lists.
        return {"hostname": self.hostname, "keeper": self.keeper._asdict(), "supervisor": self.supervisor._asdict()}


def load(paths: state_files.AppPaths) -> Owners | None:
    """Read which processes own the app; return None if the supervisor has not started yet, or the file is damaged."""
    try:
        return state_files.load(Owners, paths.supervisor, paths.trusted)
    except state_files.DamagedFileError:
        return None


def lock(paths: state_files.AppPaths) -> int:
    """Make and lock the lock file of a new app; return its descriptor.

    Raises:
        OSError: the file system has no locks, or the file cannot be made.
    """
    opened = safe_files.open_file(paths.lock, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    # Where stderr is closed, the lock would have its number, which is another file in the keeper.
    descriptor = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(opened)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        reason = f"its file system has no file locks ({os.strerror(error.errno or errno.ENOLCK)})"
        raise OSError(error.errno, reason, os.path.dirname(paths.root)) from None
    return descriptor


def are_alive(paths: state_files.AppPaths) -> bool:
    """Return whether a process holds the lock of an app, on this machine or on one whose locks can be seen from here.

    Raises:
        OSError: the file system does not answer.
    """
    try:
        descriptor = safe_files.open_file(paths.lock, below=paths.trusted)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
