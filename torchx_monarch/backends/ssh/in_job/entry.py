# SPDX-License-Identifier: BSD-3-Clause
"""Carry out a client's orders on a machine: one JSON object a line on stdin, an answer a line on stdout.

The entry ends when its connection does. What it has started of an app that the client has not confirmed then goes as
well, so a submission that is killed leaves nothing.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import signal
import sys
import time
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.snapshot import LogQuery, Outcome
from torchx_monarch.backends.local import folder, gpus, machine_queue
from torchx_monarch.backends.local.supervision import SupervisorRequest
from torchx_monarch.backends.ssh.in_job.wire import MAX_TEXT, PYTHON_FILE, READY, FoundReplica, Place
from torchx_monarch.code_sync.manifest import Tree
from torchx_monarch.code_sync.upload import Upload, UploadError, copy
from torchx_monarch.insight import events
from torchx_monarch.model import codec
from torchx_monarch.model.state import State
from torchx_monarch.supervisor import log_reader
from torchx_monarch.system import run_dirs, safe_files

_WORKSPACE = "workspace"
"""The copy of the workspace in which a replica runs, in the replica's folder."""


def paths_of(name: str) -> state_files.AppPaths:
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


def _names() -> list[str]:
    every = (state_files.app_paths(name) for name in state_files.app_ids())
    return [paths.app_id for paths in every if os.path.exists(_place_file(paths))]


def _address() -> str:
    """Return the address by which the client has reached this machine; its name where it is the client's own."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    own = words[2] if len(words) == 4 else ""
    return own if own and not own.startswith("127.") and own != "::1" else os.uname().nodename


def _find(name: str, brief: bool = True) -> FoundReplica | None:
    """Return a replica, and unless ``brief`` the events of a replica 0; None if it does not exist."""
    paths = _existing(name)
    if paths is None:
        return None
    place = state_files.load(Place, _place_file(paths), paths.trusted)
    record = folder.current_state(paths)
    if place is None or record is None:
        return None
    happened = [] if brief or place.replica else events.read_detailed(paths.events, below=paths.trusted)
    return FoundReplica(place, record, paths.load_ending(), happened)


class Code:
    """The workspaces that one connection has brought, in folders for replicas; later ones find their contents here."""

    def __init__(self) -> None:
        self._folder = os.path.join(state_files.state_dir(), "code")
        self._trees: dict[str, Tree] = {}
        self._arriving: Upload | None = None

    def expect(self, digests: list[str]) -> list[str]:
        """Prepare to receive a workspace; return the digests of its contents that are not here."""
        with contextlib.suppress(UploadError):  # the client has given up one before, as a file has changed
            self._store()
        state_files.make_folder("code")
        oldest = time.time() - max(state_files.keep_days(), 1.0) * 86400
        for name in state_files.names_in(self._folder):
            with contextlib.suppress(OSError):
                if os.stat(self._path(name), follow_symlinks=False).st_mtime < oldest:
                    run_dirs.remove_tree(self._path(name))
        self._arriving = Upload(self._folder)
        return [digest for digest in digests if not self._has(digest)]

    def take(self, piece: bytes) -> None:
        """Receive a piece of an upload with these contents."""
        assert self._arriving is not None
        self._arriving.append(piece)

    def check_out(self, tree_hash: str, folder: str) -> None:
        """Make a folder with a workspace that was received."""
        self._store()
        read = functools.partial(safe_files.read_file, limit=1 << 40)
        self._trees[tree_hash].write(folder, lambda digest: read(self._path(digest)))

    def _store(self) -> None:
        """Store the upload that has arrived."""
        upload, self._arriving = self._arriving, None
        if upload is None:
            return
        upload.unpack(lambda size: None)
        for digest in upload.contents:
            safe_files.replace_file(self._path(digest), upload.content(digest))
        self._trees[upload.tree.hash] = upload.tree

    def _path(self, digest: str) -> str:
        return os.path.join(self._folder, digest)

    def _has(self, digest: str) -> bool:
        """Return whether a content is here as it was sent: a machine that lost its power may have lost some of it."""
        try:
            with open(safe_files.open_file(self._path(digest)), "rb", buffering=0) as file:
                os.utime(file.fileno())
                return copy(file.read, lambda data: None) == digest
        except OSError:
            return False


class OrderServer:
    """The orders, each a method of the same name. A replica's name is that of its folder."""

    def __init__(self) -> None:
        self._unconfirmed: dict[str, tuple[int, int]] = {}
        """The replicas of the present submission, with the GPUs and slots that they wait for, each for itself."""
        self._code = Code()

    def hello(self) -> Any:
        return {"hostname": os.uname().nodename, "address": _address(), "python": sys.executable}

    def expect_code(self, digests: list[str]) -> Any:
        return self._code.expect(digests)

    def take_code(self, piece: str) -> Any:
        self._code.take(base64.b64decode(piece))

    def start(self, name: str, request: Any, place: Any, gpu_count: int, workspace: str, app: Any) -> Any:
        """Write a replica's folder and start its supervisor; ``confirm`` keeps it. If it fails, nothing is left.

        Args:
            request: its ``SupervisorRequest``. Its command may begin with ``python``: this interpreter.
            place: its ``Place``.
            gpu_count: the GPUs for which it waits; none without any, or if its role names some or waits for slots.
            workspace: the hash of the one in which the replica runs; empty without one.
        """
        from torchx_monarch.backends.local import submit  # imports TorchX, which the other orders do without

        decoded = codec.decode(SupervisorRequest, request)
        where = codec.decode(Place, place)
        where.address = _address()
        (role,) = decoded.roles
        if workspace:
            role.cwd = os.path.join(paths_of(name).root, _WORKSPACE)
        else:
            role.cwd = next((path for path in (role.cwd, os.path.expanduser("~")) if os.path.isdir(path)), "/")
        if role.command[0] == "python":
            role.command[0] = sys.executable
        path = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', os.defpath)}"
        role.env.setdefault("PATH", path.replace("$", "$$"))
        environ = {**os.environ, "PATH": role.filled("", 0)[1]["PATH"]}
        waits = not (decoded.slots or role.spec.sidecar or gpus.CUDA_VISIBLE_DEVICES in role.env)
        if gpu_count and waits and gpus.devices(environ):
            decoded.gpus = gpu_count
        self._unconfirmed[name] = decoded.gpus, decoded.slots
        count, slots = map(sum, zip(*self._unconfirmed.values(), strict=True))
        if reason := machine_queue.check(count, slots, environ):
            raise ValueError(reason)

        def fill(root: str) -> None:
            state_files.write_json(_place_file(state_files.AppPaths(root)), asdict(where))
            if workspace:
                self._code.check_out(workspace, os.path.join(root, _WORKSPACE))

        submit.submit(decoded, app, fill)
        with contextlib.suppress(OSError):  # for clients that have no more than a handle
            safe_files.replace_file(os.path.join(state_files.state_dir(), PYTHON_FILE), os.fsencode(sys.executable))

    def confirm(self) -> Any:
        self._unconfirmed.clear()

    def give_up(self) -> Any:
        """Remove what was started and not confirmed."""
        self.remove(list(self._unconfirmed))
        self.confirm()

    def read(self, names: list[str], brief: bool) -> Any:
        """Return what replicas exist of some."""
        return [asdict(found) for name in names if (found := _find(name, brief))]

    def read_all(self) -> Any:
        """Return all replicas on this machine, and which files are damaged."""
        found, damaged = [], []
        for name in _names():
            try:
                found += self.read([name], True)
            except state_files.DamagedFileError as error:
                damaged.append(str(error))
        return {"replicas": found, "damaged": damaged}

    def stop(self, names: list[str], outcome: Any, grace: float | None) -> Any:
        for paths in filter(None, map(_existing, names)):
            folder.request_stop(paths, codec.decode(Outcome, outcome), grace)

    def remove(self, names: list[str]) -> Any:
        """End replicas that still run, and remove what is stored of them."""
        for paths in filter(None, map(_existing, names)):
            folder.request_stop(paths, Outcome(State.CANCELLED), 0.0)
            until = time.monotonic() + 60.0
            while (record := folder.current_state(paths)) and not record.terminal and time.monotonic() < until:
                time.sleep(0.02)
            folder.remove_ended(paths)

    def log(self, name: str, role: str, replica: int, start: int, **query: Any) -> Any:
        """Return the next lines of a replica's log, up to ``MAX_TEXT``; none at its end.

        Args:
            start: where they begin, the ``end`` of a line that was read before; 0 for the first ones of the query.
            query: ``stream``, ``tail``, ``ranks``, ``since`` and ``until`` of a ``LogQuery``; times as numbers.
        """
        paths = paths_of(name)
        for limit in ("since", "until"):
            if query[limit] is not None:
                query[limit] = datetime.fromtimestamp(query[limit], timezone.utc)
        query["ranks"] = [range(*ranks) for ranks in query["ranks"]]
        answer, size = [], 0
        for lines in log_reader.lines(paths.replica_logs(role, replica), LogQuery(**query), paths.trusted, start):
            answer.append(lines)
            size += len(lines.text)
            if size >= MAX_TEXT:
                break
        return answer


def main() -> None:
    """Answer until the end of the input."""
    for number in (signal.SIGHUP, signal.SIGPIPE, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # What is started must not write to the connection.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    server = OrderServer()
    try:
        print(READY, file=out, flush=True)
        for line in sys.stdin.buffer:
            order = json.loads(line)
            try:
                text = json.dumps({"answer": getattr(server, order.pop("order"))(**order)})
            except Exception as error:
                text = json.dumps({"refused": " ".join(str(error).split()) or repr(error)})
            print(text, file=out, flush=True)
    except OSError:  # the client is gone
        pass
    finally:
        server.give_up()
        os._exit(0)
