# SPDX-License-Identifier: BSD-3-Clause
"""Name the files of all apps on disk, and read and write them.

The state directory is ``$MONARCH_STATE_DIR``, else ``$XDG_STATE_HOME/torchx-monarch``, else
``~/.local/state/torchx-monarch``. Below it ``apps/<app id>/`` is one app. Folders have mode 0700, files 0600. A file
that another process reads is written aside and renamed, so a reader sees the old content or the new, never half of it;
events and logs are append-only. An app exists from when its ``status.json`` does, which is written last; its folder
is renamed before it is removed.
"""

from __future__ import annotations

import abc
import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TypeVar

from torchx_monarch.backends.core.snapshot import Outcome
from torchx_monarch.model import codec
from torchx_monarch.system import safe_files
from torchx_monarch.system.untrusted_text import one_line

T = TypeVar("T")

MAX_FILE_BYTES = 256 * 1024 * 1024
"""The maximum bytes read of a file: the status of hundreds of replicas holds the error file of each."""

BATCH_IDS = "ids"
"""The folder, in that of a batch system (``slurm``, ``pbs``), whose links lead from ids of apps to their folders."""

_KEEP_DAYS = 14.0


class DamagedFileError(ValueError):
    """Raised when a file of the state directory does not hold what was written; the message names file and reason."""


def state_dir(environ: Mapping[str, str] = os.environ) -> str:
    """Return the absolute path of the state directory, which need not exist."""
    if chosen := environ.get("MONARCH_STATE_DIR"):
        return os.path.abspath(os.path.expanduser(chosen))
    base = environ.get("XDG_STATE_HOME", "")
    # The XDG specification requires that relative values be ignored.
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.local/state")
    return os.path.abspath(os.path.join(base, "torchx-monarch"))


def apps_dir() -> str:
    """Return the folder that holds one folder per app."""
    return os.path.join(state_dir(), "apps")


def keep_days() -> float:
    """Return the number of days for which an ended app is kept: ``$MONARCH_KEEP_DAYS``, else 14."""
    with contextlib.suppress(ValueError):
        return max(0.0, float(os.environ.get("MONARCH_KEEP_DAYS", _KEEP_DAYS)))
    return _KEEP_DAYS


def path_name(name: str) -> str:
    """Return a name as one path component: percent-encoded where it is not safe; different names stay different."""
    raw = name.encode(errors="surrogateescape")
    safe = b"".join(bytes([c]) if chr(c).isalnum() and c < 128 or c in b"_-." else b"%%%02X" % c for c in raw)
    if safe[:1] == b".":
        safe = b"%2E" + safe[1:]
    return safe.decode() or "%"


def is_app_id(app_id: str) -> bool:
    """Return whether a text can be the id of an app, and so the name of its folder."""
    return bool(app_id) and not app_id.startswith(".") and path_name(app_id) == app_id


class SupervisorPaths(abc.ABC):
    """The files of what one supervisor runs: an app, or one replica of an app of several machines.

    Attributes:
        root: the folder.
        trusted: a folder below which all belongs to the caller and is no symbolic link (``safe_files``).
        request: what the supervisor runs.
        status: the record that it writes.
        cancel: the request to end it.
        reserve: disk space that is reserved for the final record.
        run: the folder for sockets while it runs, unless its path is too long for a socket.
    """

    def __init__(self, root: str, trusted: str) -> None:
        self.root = root
        self.trusted = trusted
        self.request = os.path.join(root, "request.json")
        self.status = os.path.join(root, "status.json")
        self.cancel = os.path.join(root, "cancel.json")
        self.events = os.path.join(root, "events.jsonl")
        self.reserve = os.path.join(root, "reserve")
        self.run = os.path.join(root, "run")

    @abc.abstractmethod
    def replica_logs(self, role: str, replica: int) -> str:
        """Return the folder of one replica's logs."""

    def load_stop(self) -> Outcome | None:
        """Read the request to end the app, cancel.json; return None if there is none.

        The first outcome counts, and the shortest grace period. PENDING: the app goes back into a batch system's queue.
        """
        return load_undamaged(Outcome, self.cancel, self.trusted)

    def load_ending(self) -> Outcome | None:
        """Read how the app was asked to end; return None if it was not, or goes back into the queue."""
        stop = self.load_stop()
        return stop if stop and stop.state.is_terminal else None

    def write_stop(self, outcome: Outcome, grace: float | None) -> None:
        """Write the request to end the app; arguments as for ``Backend.stop``."""
        asked = self.load_ending()
        if asked is None:
            asked = replace(outcome, time=outcome.time or time.time(), grace=grace)
        elif grace is not None and (asked.grace is None or grace < asked.grace):
            asked = replace(asked, grace=grace)
        else:
            return
        write_json(self.cancel, asdict(asked), below=self.trusted)


class AppPaths(SupervisorPaths):
    """All paths below one app's folder (docs/reference/files.md), which is in a folder of the state directory.

    Attributes:
        lock: a file that the app's supervisor has locked while it lives.
        supervisor: the process that runs the app, and its machine.
    """

    def __init__(self, root: str) -> None:
        super().__init__(root, os.path.dirname(os.path.dirname(root)))
        self.app_id = os.path.basename(root)
        self.app = os.path.join(root, "app.json")
        self.lock = os.path.join(root, "lock")
        self.supervisor = os.path.join(root, "supervisor.json")
        self.supervisor_log = os.path.join(root, "supervisor.log")
        self.logs = os.path.join(root, "logs")

    def check_owner(self) -> None:
        """Check that the app's folder belongs to the caller.

        Raises:
            OSError: the folder does not exist, may not be entered, is a link or belongs to another user.
        """
        os.close(safe_files.open_folder(self.root, below=self.trusted))

    def replica_logs(self, role: str, replica: int) -> str:
        return os.path.join(self.logs, path_name(role), str(replica))


def app_paths(app_id: str) -> AppPaths:
    """Return the paths of the app with this id, whether it exists or not."""
    return AppPaths(os.path.join(apps_dir(), app_id))


def app_ids() -> list[str]:
    """Return the ids of all apps on disk, in no order. Entries whose names cannot be ids are left out."""
    return [name for name in names_in(apps_dir()) if is_app_id(name)]


def make_folder(*names: str) -> str:
    """Make a folder of the state directory, and those above it, with mode 0700; return its path.

    Args:
        names: its path below the state directory, one name for each folder.

    Raises:
        OSError: a folder cannot be made, is not the caller's, or others may write to the state directory: they could
            put another folder into the place of a job's.
    """
    root = path = state_dir()
    _make_folders(root)
    if (mode := os.stat(root).st_mode) & 0o022:
        raise safe_files.UnsafeFileError(root, f"is writable for others (mode {mode & 0o777:o}): chmod go-w {root}")
    for name in names:
        path = os.path.join(path, name)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        os.close(safe_files.open_folder(path, below=root))  # before anything is made inside of it
    return path


def _make_folders(path: str) -> None:
    """Make a folder and those above it; ``os.makedirs`` makes those above with what the umask leaves of 0777."""
    if not os.path.isdir(path):
        _make_folders(os.path.dirname(path))
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)


def names_in(folder: str) -> list[str]:
    """Return the names in a folder of the state directory, in no order; none if it does not exist.

    Raises:
        OSError: it may not be read, is a link, or belongs to another user.
    """
    try:
        fd = safe_files.open_folder(folder, below=state_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


def remove_file(path: str) -> None:
    """Remove a file of the state directory, if it exists; do nothing if its folder must not or cannot be used."""
    with contextlib.suppress(OSError):
        fd = safe_files.open_folder(os.path.dirname(path), below=state_dir())
        try:
            os.unlink(os.path.basename(path), dir_fd=fd)
        finally:
            os.close(fd)


def write_json(path: str, value: object, *, below: str | None = None) -> None:
    """Replace a file atomically; objects that JSON does not support are written as their ``str``.

    Args:
        below: as for ``load``.
    """
    if below is not None:
        os.close(safe_files.open_folder(os.path.dirname(path), below=below))
    safe_files.replace_file(path, json.dumps(value, default=str, separators=(",", ":")).encode())


def load(cls: type[T], path: str, below: str | None = None) -> T | None:
    """Read a file of the state directory into a data class; return None if the file does not exist.

    Args:
        below: a folder of the caller inside which no link is followed (``safe_files.open_file``); None for no check.

    Raises:
        DamagedFileError: the file cannot be read, or does not hold a ``cls``.
    """
    try:
        return codec.decode(cls, safe_files.read_json(path, limit=MAX_FILE_BYTES, below=below))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except safe_files.UnsafeFileError as error:
        raise DamagedFileError(str(error)) from None
    except OSError as error:
        raise DamagedFileError(f"{one_line(path)} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DamagedFileError(f"{one_line(path)} is damaged: {error}") from None


def load_undamaged(cls: type[T], path: str, below: str | None = None) -> T | None:
    """Do as ``load``; return None for a damaged file, too: NFS may not find one that is just being replaced."""
    with contextlib.suppress(DamagedFileError):
        return load(cls, path, below)
    return None
