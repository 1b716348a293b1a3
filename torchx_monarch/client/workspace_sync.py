# SPDX-License-Identifier: BSD-3-Clause
"""Send a workspace to the hosts of a live allocation, without the files that they already have.

``host.code_distribution`` describes the messages.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from typing import Any, Literal

from torchx_monarch.client.connection import Connection, Target
from torchx_monarch.code_sync.manifest import MARKER, Tree, is_home_or_root
from torchx_monarch.code_sync.upload import PIECE, pack
from torchx_monarch.exceptions import CodeError

SyncMode = Literal["auto", "always", "never"]
"""When each host gets its own copy of the workspace. ``auto``: unless all hosts see the folder itself, for example on a
shared file system; ``always``: before each run; ``never``: not at all, the hosts use the code that they have."""

_ANSWER_TIMEOUT = 300.0
"""Seconds for an answer: replica 0 unpacks the files first, possibly on a slow disk."""


def sync_workspace(target: Target, workspace: str, when: SyncMode) -> dict[str, Any]:
    """Make the current state of a workspace, without ignored files, available to every host for a run.

    Returns:
        The fields ``code`` or ``cwd`` of a ``RunRequest``; none if the hosts use the code that they have.

    Raises:
        CodeError: the workspace cannot be read, exceeds the limits or keeps changing; or replica 0 could not store it.
        UnreachableError: the allocation cannot be reached.
        RefusedError: the allocation refuses the request.
    """
    if when == "never":
        return {}
    from torchx_monarch.code_sync.scan import ScanError, scan_and_send

    root = os.path.abspath(workspace)
    if when == "auto" and _is_shared(target, root):
        return {"cwd": root}
    try:
        return {"code": scan_and_send(root, lambda tree: _send(target, root, tree))}
    except (ScanError, OSError) as error:
        raise CodeError(f"{error} (or run without bringing the code: sync='never')") from None


def current_workspace() -> str | None:
    """Return the current folder; None if it is the home folder or ``/``."""
    current = os.getcwd()
    return None if is_home_or_root(current) else current


def _is_shared(target: Target, root: str) -> bool:
    """Whether all hosts see the same folder at the same path. They are asked for a temporary file created in it."""
    path = os.path.join(root, f"{MARKER}{uuid.uuid4().hex}")
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o644))
    except OSError:
        return False  # not a writable folder: the hosts cannot be tested for it
    try:
        with Connection.open(target, {"type": "sync", "path": path}) as link:
            return _answer(link)["shared"] is True
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _send(target: Target, root: str, tree: Tree) -> None:
    request = {"type": "sync", "tree": tree.hash}
    with Connection.open(target, request) as link:
        answer = _answer(link)
    if answer["have"]:
        return
    stored = set(answer["digests"])
    with tempfile.TemporaryFile() as file:
        size = pack(root, tree, [digest for digest in tree.contents if digest[:16] not in stored], file)
        with Connection.open(target, {**request, "size": size}) as link:
            _answer(link)
            while piece := file.read(PIECE):
                link.send_bytes(piece)
            _answer(link)


def _answer(link: Connection) -> dict[str, Any]:
    answer = link.answer(_ANSWER_TIMEOUT)
    if answer["type"] == "failed":
        raise CodeError(f"the code was not brought to the hosts: {answer.get('reason')}")
    return answer
