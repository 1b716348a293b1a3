# SPDX-License-Identifier: BSD-3-Clause
"""The replicas on this machine, each an app of ``backends.local``, and the code that a connection brings for them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.local import gpus, state
from torchx_monarch.backends.local.request import LocalRequest
from torchx_monarch.backends.ssh.in_job.wire import PYTHON_FILE, Ending, Place
from torchx_monarch.code_sync.manifest import Tree, Unpacker
from torchx_monarch.code_sync.work_folder import WorkFolder
from torchx_monarch.insight import events
from torchx_monarch.model import codec
from torchx_monarch.system import run_dirs, safe_files

_GONE_WITHIN = 60.0

_WORKSPACE = "workspace"
"""The copy of the workspace in which a replica runs, in the replica's folder."""

_INCOMING = ".new-"


def paths_of(name: str) -> state_files.AppPaths:
    """Return the paths of a replica.

    Raises:
        ValueError: the name is none of a folder.
    """
    if not state_files.is_app_id(name):
        raise ValueError(f"{name!r} is no id")
    return state_files.app_paths(name)


def _exists(paths: state_files.AppPaths) -> bool:
    """Return whether the folder of a replica exists, is this user's and no link."""
    try:
        paths.check_owner()
    except OSError:
        return False
    return True


def _place_file(paths: state_files.AppPaths) -> str:
    return os.path.join(paths.root, "place.json")


def _ending_file(paths: state_files.AppPaths) -> str:
    return os.path.join(paths.root, "ending.json")


def names() -> list[str]:
    """Return the names of all replicas on this machine."""
    every = (state_files.app_paths(name) for name in state_files.app_ids())
    return [paths.app_id for paths in every if os.path.exists(_place_file(paths))]


def start(name: str, request: Any, place: Any, count: int, app: Any, code: Code, workspace: str) -> None:
    """Write a replica's folder and start its supervisor.

    Args:
        name: of its folder.
        request: its ``LocalRequest`` as JSON values. Its command may begin with ``python``: this interpreter.
        place: its ``Place`` as JSON values.
        workspace: the hash of the one in which the replica runs; empty without one.

    Raises:
        SubmitError: it could not be started, or this machine has too few free GPUs; nothing is left.
    """
    from torchx_monarch.backends.local import submit  # imports TorchX, which the other orders do without

    decoded = codec.decode(LocalRequest, request)
    where = codec.decode(Place, place)
    (replica,) = decoded.roles[0].replicas
    if workspace:
        replica.cwd = os.path.join(paths_of(name).root, _WORKSPACE)
    else:
        replica.cwd = next((path for path in (replica.cwd, os.path.expanduser("~")) if os.path.isdir(path)), "/")
    if replica.args[0] == "python":
        replica.args[0] = sys.executable
    replica.env.setdefault("PATH", f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', os.defpath)}")

    def fill(root: str) -> None:
        state_files.write_json(_place_file(state_files.AppPaths(root)), asdict(where))
        if workspace:
            code.check_out(workspace, os.path.join(root, _WORKSPACE))

    with _gpu_lock():
        if count > 0 and gpus.CUDA_VISIBLE_DEVICES not in replica.env:
            where.gpus = _free_gpus(count, replica.env["PATH"])
            if where.gpus:
                replica.env[gpus.CUDA_VISIBLE_DEVICES] = ",".join(where.gpus)
        submit.submit(decoded, app, fill)
    _note_python()


def _note_python() -> None:
    """Note this interpreter for clients that have no more than a handle."""
    with contextlib.suppress(OSError):
        safe_files.replace_file(os.path.join(state_files.state_dir(), PYTHON_FILE), os.fsencode(sys.executable))


@contextlib.contextmanager
def _gpu_lock() -> Iterator[None]:
    """Let one client at a time choose GPUs; the folder of a replica says which it has."""
    lock = os.open(state_files.make_folder("apps"), os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _free_gpus(count: int, path: str) -> list[str]:
    """Return GPUs that no living replica has; empty on a machine without any.

    Raises:
        SubmitError: there are too few.
    """
    from torchx_monarch.backends.core.errors import SubmitError

    every = gpus.devices({**os.environ, "PATH": path})
    if not every:
        return []
    taken = set[str]()
    for name in names():
        paths = paths_of(name)
        record = state.current_state(paths)
        if record is not None and not record.terminal:
            taken.update(_gpus_of(paths))
    free = [gpu for gpu in every if gpu not in taken]
    if len(free) < count:
        raise SubmitError(
            f"the replica asks for {count} of this machine's {len(every)} GPUs, and {len(free)} are free; other jobs "
            "have the rest"
        )
    return free[:count]


def _gpus_of(paths: state_files.AppPaths) -> list[str]:
    """Return the GPUs that a replica was given."""
    place = state_files.load(Place, _place_file(paths), paths.trusted)
    return place.gpus if place is not None else []


def read(name: str, brief: bool) -> Any:
    """Return place, ending and record of a replica, or which file of these is damaged; None if it does not exist.

    Args:
        name: its folder.
    """
    paths = paths_of(name)
    if not _exists(paths):
        return None
    try:
        place = state_files.load(Place, _place_file(paths), paths.trusted)
        ending = state_files.load(Ending, _ending_file(paths), paths.trusted)
        record = state.current_state(paths)
    except state_files.DamagedFileError as error:
        return {"damaged": str(error)}
    if record is None or place is None:
        return None
    happened = [] if brief else events.read(paths.events, below=paths.trusted)[0]
    ranks = sum(event["kind"] == "rank_restart" for event in happened)
    return {
        "place": asdict(place),
        "ending": ending and asdict(ending),
        "record": record.to_json(),
        "rank_restarts": ranks,
    }


def stop(name: str, ending: Any, grace: float | None) -> None:
    """Begin to end a replica, and record why, unless that is recorded."""
    paths = paths_of(name)
    if not _exists(paths):
        return
    if not os.path.exists(_ending_file(paths)):
        with contextlib.suppress(OSError):
            state_files.write_json(_ending_file(paths), asdict(codec.decode(Ending, ending)))
    record = state.current_state(paths)
    if record is not None and not record.terminal:
        state.request_stop(paths, grace)


def remove(name: str) -> None:
    """Kill what runs of a replica, and remove its folder."""
    paths = paths_of(name)
    if not _exists(paths):
        return
    record = state.current_state(paths)
    if record is not None and not record.terminal:
        state.request_stop(paths, 0.0)
        until = time.monotonic() + _GONE_WITHIN
        while (latest := state.current_state(paths)) and not latest.terminal and time.monotonic() < until:
            time.sleep(0.02)
    state.remove_ended(paths)


class Code:
    """The workspaces that one connection has brought."""

    def __init__(self) -> None:
        self._folder = os.path.join(state_files.state_dir(), "code")
        self._trees: dict[str, Tree] = {}
        self._incoming = ""
        self._unpacker: Unpacker | None = None

    def expect(self, encoded: bytes) -> list[str]:
        """Prepare to receive a workspace, and return the digests of the contents that are not here.

        Args:
            encoded: its ``Tree``, encoded.

        Raises:
            TreeError: it is none.
            OSError: the disk has too little space, or the folder cannot be made or belongs to another user.
        """
        self.close()
        tree = Tree.decode(encoded)
        state_files.make_folder("code")
        self._remove_old()
        missing = {digest: size for digest, size in tree.contents.items() if not self._has(digest, size)}
        free = os.statvfs(self._folder)
        needed = sum(missing.values()) + sum(entry.size for entry in tree.entries.values())
        if needed > free.f_bavail * free.f_frsize:
            raise OSError(f"no space left in {self._folder} for the workspace, which needs {needed >> 20} MiB")
        self._incoming = tempfile.mkdtemp(prefix=_INCOMING, dir=self._folder)
        self._unpacker = Unpacker(tree.contents, missing, self._incoming, self._keep)
        self._trees[tree.hash] = tree
        return list(missing)

    def take(self, piece: bytes) -> None:
        """Receive a piece of the archive of the expected contents.

        Raises:
            PackError: it is none.
            OSError: it cannot be written.
        """
        if self._unpacker is not None:
            self._unpacker.feed(piece)

    def check_out(self, tree_hash: str, folder: str) -> None:
        """Make a folder with a workspace that was received.

        Raises:
            OSError: a content was not received, or the folder cannot be written.
        """
        WorkFolder(folder).checkout(self._trees[tree_hash], self._path)

    def close(self) -> None:
        """Remove what is not complete."""
        if self._unpacker is not None:
            self._unpacker.close()
        if self._incoming:
            run_dirs.remove_tree(self._incoming)
        self._unpacker, self._incoming = None, ""

    def _path(self, digest: str) -> str:
        return os.path.join(self._folder, digest)

    def _keep(self, digest: str, path: str) -> None:
        os.rename(path, self._path(digest))

    def _has(self, digest: str, size: int) -> bool:
        """Return whether a content is here as it was sent: a machine that lost its power may have lost some of it."""
        found = hashlib.sha256()
        try:
            with open(safe_files.open_file(self._path(digest)), "rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size != size:
                    return False
                os.utime(file.fileno())
                while data := file.read(1 << 20):
                    found.update(data)
        except OSError:
            return False
        return found.hexdigest() == digest

    def _remove_old(self) -> None:
        oldest = time.time() - max(state_files.keep_days(), 1.0) * 86400
        for name in state_files.names_in(self._folder):
            path = os.path.join(self._folder, name)
            with contextlib.suppress(OSError):
                if os.stat(path, follow_symlinks=False).st_mtime < oldest:
                    if name.startswith(_INCOMING):
                        run_dirs.remove_tree(path)
                    else:
                        os.unlink(path)
