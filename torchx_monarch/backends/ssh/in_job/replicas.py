# SPDX-License-Identifier: BSD-3-Clause
"""The replicas on this machine, each an app of ``backends.local``, and the workspaces that a connection brings."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sys
import tempfile
import time
from dataclasses import asdict
from typing import Any

from torchx_monarch.backends.core import state_files, stop_request
from torchx_monarch.backends.core.snapshot import Outcome
from torchx_monarch.backends.local import gpus, state
from torchx_monarch.backends.local.request import LocalRequest
from torchx_monarch.backends.ssh.in_job.wire import PYTHON_FILE, FoundReplica, Place
from torchx_monarch.code_sync.code_store import ContentStore
from torchx_monarch.code_sync.manifest import Tree
from torchx_monarch.code_sync.work_folder import WorkFolder
from torchx_monarch.insight import events
from torchx_monarch.model import codec
from torchx_monarch.model.state import State
from torchx_monarch.system import run_dirs, safe_files

_GONE_WITHIN = 60.0

_WORKSPACE = "workspace"
"""The copy of the workspace in which a replica runs, in the replica's folder."""


def paths_of(name: str) -> state_files.AppPaths:
    """Return the paths of a replica.

    Raises:
        ValueError: the name is none of a folder.
    """
    if not state_files.is_app_id(name):
        raise ValueError(f"{name!r} is no id")
    return state_files.app_paths(name)


def _existing(name: str) -> state_files.AppPaths | None:
    """Return the paths of a replica if its folder exists, is this user's and no link."""
    paths = paths_of(name)
    try:
        paths.check_owner()
    except OSError:
        return None
    return paths


def _place_file(paths: state_files.AppPaths) -> str:
    return os.path.join(paths.root, "place.json")


def names() -> list[str]:
    """Return the names of all replicas on this machine."""
    every = (state_files.app_paths(name) for name in state_files.app_ids())
    return [paths.app_id for paths in every if os.path.exists(_place_file(paths))]


def start(*, name: str, request: Any, place: Any, gpu_count: int, workspace: str, app: Any, code: Code) -> None:
    """Write a replica's folder and start its supervisor.

    Args:
        request: its ``LocalRequest``. Its command may begin with ``python``: this interpreter.
        place: its ``Place``.
        workspace: the hash of the one in which the replica runs; empty without one.

    Raises:
        SubmitError: it could not be started, or this machine has too few free GPUs; nothing is left.
    """
    from torchx_monarch.backends.local import submit  # imports TorchX, which the other orders do without

    decoded = codec.decode(LocalRequest, request)
    where = codec.decode(Place, place)
    where.address = address()
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

    lock = os.open(state_files.make_folder("apps"), os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one client at a time chooses GPUs; the folder of a replica says which it has
        if gpu_count > 0 and gpus.CUDA_VISIBLE_DEVICES not in replica.env:
            where.gpus = _free_gpus(gpu_count, replica.env["PATH"])
            if where.gpus:
                replica.env[gpus.CUDA_VISIBLE_DEVICES] = ",".join(where.gpus)
        submit.submit(decoded, app, fill)
    finally:
        os.close(lock)
    with contextlib.suppress(OSError):  # for clients that have no more than a handle
        safe_files.replace_file(os.path.join(state_files.state_dir(), PYTHON_FILE), os.fsencode(sys.executable))


def address() -> str:
    """Return the address by which the client has reached this machine; its name where it is the client's own."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    own = words[2] if len(words) == 4 else ""
    return own if own and not own.startswith("127.") and own != "::1" else os.uname().nodename


def _free_gpus(count: int, path: str) -> list[str]:
    """Return GPUs that no living replica has; empty on a machine without any.

    Raises:
        SubmitError: there are too few.
    """
    from torchx_monarch.backends.core.errors import SubmitError

    every = gpus.devices({**os.environ, "PATH": path})
    if not every:
        return []
    living = [replica for name in names() if (replica := find(name)) and not replica.record.terminal]
    free = [gpu for gpu in every if not any(gpu in replica.place.gpus for replica in living)]
    if len(free) < count:
        raise SubmitError(
            f"the replica asks for {count} of this machine's {len(every)} GPUs, and {len(free)} are free; other jobs "
            "have the rest"
        )
    return free[:count]


def find(name: str, brief: bool = True) -> FoundReplica | None:
    """Return a replica, and unless ``brief`` its restarts of ranks; None if it does not exist.

    Args:
        name: its folder.

    Raises:
        DamagedFileError: one of its files is damaged.
    """
    paths = _existing(name)
    if paths is None:
        return None
    place = state_files.load(Place, _place_file(paths), paths.trusted)
    record = state.current_state(paths)
    happened = [] if brief else events.read(paths.events, below=paths.trusted)[0]
    ranks = sum(event["kind"] == "rank_restart" for event in happened)
    return FoundReplica(place, record, stop_request.load_outcome(paths), ranks) if place and record else None


def stop(name: str, outcome: Outcome, grace: float | None) -> None:
    """Begin to end a replica; arguments as for ``Backend.stop``."""
    if paths := _existing(name):
        state.request_stop(paths, outcome, grace)


def remove(name: str) -> None:
    """Kill what runs of a replica, and remove its folder."""
    if paths := _existing(name):
        state.request_stop(paths, Outcome(State.CANCELLED), 0.0)
        until = time.monotonic() + _GONE_WITHIN
        while (record := state.current_state(paths)) and not record.terminal and time.monotonic() < until:
            time.sleep(0.02)
        state.remove_ended(paths)


class Code(ContentStore):
    """The workspaces that one connection has brought, in folders for replicas."""

    def __init__(self) -> None:
        super().__init__(os.path.join(state_files.state_dir(), "code"))
        self._trees: dict[str, Tree] = {}
        self._incoming = ""

    def expect(self, encoded: bytes) -> list[str]:
        """Prepare to receive a workspace, and return the digests of the contents that are not here.

        Args:
            encoded: its ``Tree``, encoded.

        Raises:
            TreeError: it is none.
            OSError: the disk has too little space, or the folder cannot be made or belongs to another user.
        """
        tree = Tree.decode(encoded)
        state_files.make_folder("code")
        oldest = time.time() - max(state_files.keep_days(), 1.0) * 86400
        for name in state_files.names_in(self.folder):
            with contextlib.suppress(OSError):
                if os.stat(self.path(name), follow_symlinks=False).st_mtime < oldest:
                    run_dirs.remove_tree(self.path(name))
        self._trees[tree.hash] = tree
        stored = {digest for digest in tree.contents if self._has(digest)}
        missing = self.receive(tree, stored, incoming := tempfile.mkdtemp(prefix=".new-", dir=self.folder))
        self._incoming = incoming
        return missing

    def cancel_transfer(self) -> None:
        """Cancel the current transfer, and remove its folder, which is this connection's own."""
        super().cancel_transfer()
        if self._incoming:
            run_dirs.remove_tree(self._incoming)
        self._incoming = ""

    def check_out(self, tree_hash: str, folder: str) -> None:
        """Make a folder with a workspace that was received.

        Raises:
            OSError: a content was not received, or the folder cannot be written.
        """
        WorkFolder(folder).checkout(self._trees[tree_hash], self.path)

    def _has(self, digest: str) -> bool:
        """Return whether a content is here as it was sent: a machine that lost its power may have lost some of it."""
        found = hashlib.sha256()
        try:
            with open(safe_files.open_file(self.path(digest)), "rb", buffering=0) as file:
                os.utime(file.fileno())
                while data := file.read(1 << 20):
                    found.update(data)
        except OSError:
            return False
        return found.hexdigest() == digest
