# SPDX-License-Identifier: BSD-3-Clause
"""Send a workspace to the hosts of a live allocation, without the files that they already have.

``host.code_distribution`` describes the messages.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable
from typing import Any, Literal, get_args

from torchx_monarch.client.connection import Connection, Target
from torchx_monarch.code_sync.manifest import MARKER, PIECE, ChangedError, Tree, is_home_or_root, pack
from torchx_monarch.exceptions import CodeError

SyncMode = Literal["auto", "always", "never"]
"""When each host gets its own copy of the workspace. ``auto``: unless all hosts see the folder itself, for example on a
shared file system; ``always``: before each run; ``never``: not at all, the hosts use the code that they have."""

_TRIES = 5
"""Number of attempts to send a workspace that changes between scan and transfer."""

_ANSWER_TIMEOUT = 300.0
"""Seconds for an answer: all hosts unpack the files first, possibly on slow disks."""


def sync_workspace(target: Target, workspace: str, when: SyncMode) -> dict[str, Any]:
    """Make the current state of a workspace available on every host, but for files that it ignores.

    Returns:
        The fields ``code`` or ``cwd`` of a ``RunRequest``; none if the hosts use the code that they have.

    Raises:
        CodeError: the workspace cannot be read, exceeds the limits or keeps changing; or a host could not store it.
        UnreachableError: the allocation cannot be reached.
        RefusedError: the allocation refuses the request.
    """
    if when == "never":
        return {}
    from torchx_monarch.code_sync.scan import ScanError, scan

    root = os.path.abspath(workspace)
    for _ in range(_TRIES):
        with Connection.open(target, {"type": "sync"}) as link:
            if when == "auto" and _is_shared(link, root):
                return {"cwd": root}
            try:
                tree = scan(root)
                _send(link, root, tree)
            except ScanError as error:
                raise CodeError(f"{error} (or run without bringing the code: sync='never')") from None
            except ChangedError as error:
                changing = error
                continue
            except OSError as error:
                raise CodeError(f"cannot read {error.filename} of the workspace: {error.strerror}") from None
            return {"code": tree.hash}
    raise CodeError(
        f"{changing} changes all the time: what is not for the hosts can be named in .torchxignore or .gitignore"
    )


def check_when(when: str) -> None:
    """Raise a ValueError, which lists the values, if a string is no ``SyncMode``."""
    if when not in get_args(SyncMode):
        raise ValueError(f"sync={when!r} is none of {', '.join(get_args(SyncMode))}")


def current_workspace() -> str | None:
    """Return the current folder; None if it is the home folder or ``/``."""
    current = os.getcwd()
    return None if is_home_or_root(current) else current


def _is_shared(link: Connection, root: str) -> bool:
    """Whether all hosts see the same folder at the same path. They are asked for a temporary file created in it."""
    name = os.path.join(root, f"{MARKER}{uuid.uuid4().hex}")
    text = uuid.uuid4().hex
    try:
        with open(name, "x", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o644)) as file:
            file.write(text)
    except OSError:
        return False  # not a writable folder: the hosts cannot be tested for it
    try:
        link.send({"type": "probe", "path": name, "text": text})
        return _answer(link)["shared"] is True
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)


def _send(link: Connection, root: str, tree: Tree) -> None:
    link.send({"type": "tree", "tree": tree.hash})
    if _answer(link)["have"]:
        return
    encoded = tree.encode()
    _send_frames(link, (encoded[at : at + PIECE] for at in range(0, len(encoded), PIECE)))
    bits = int(_answer(link)["missing"], 16)
    missing = [digest for number, digest in enumerate(tree.contents) if bits >> number & 1]
    _send_frames(link, pack(tree.files(root, missing)))
    _answer(link)


def _send_frames(link: Connection, frames: Iterable[bytes]) -> None:
    for frame in frames:
        link.send_bytes(len(frame).to_bytes(4, "big") + frame)
    link.send_bytes(bytes(4))


def _answer(link: Connection) -> dict[str, Any]:
    answer = link.answer(_ANSWER_TIMEOUT)
    if answer["type"] == "failed":
        raise CodeError(f"the code was not brought to the hosts: {answer.get('reason')}")
    return answer
