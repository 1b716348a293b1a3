# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Send a workspace to the hosts of a live allocation: the parts that they lack (see ``host.code_distribution``)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from torchx_monarch.backends.local import state_files
from torchx_monarch.client.connection import Connection
from torchx_monarch.client.target import Target
from torchx_monarch.code_sync.archive import ChangedError, pack
from torchx_monarch.code_sync.manifest import MARKER, Tree
from torchx_monarch.exceptions import CodeError, UnreachableError

if TYPE_CHECKING:
    from torchx_monarch.code_sync.scan import StatCache

When = Literal["auto", "always", "never"]
"""``auto``: unless all hosts see the folder itself; ``always``: in any case; ``never``: not at all."""

_FRAME = 1 << 19
"""Bytes; ``host.code_distribution.FRAME``."""

_TRIES = 5
"""How often the workspace is looked at again because it has changed before all of it was sent."""

_READ_AGAIN = 100
"""Files of which it is not kept what was found of them."""

_ANSWER_TIMEOUT = 300.0
"""Seconds for an answer: every host unpacks what it got, on whatever disk it has."""


_memories: dict[str, StatCache] = {}
"""What is kept in files, by their names."""


_not_code: set[str] = set()
"""Folders that have more in them than code: it would take as long to find that again."""

_brought: dict[str, Tree] = {}
"""What was brought last, by workspace: most of the next is the same."""


@dataclass(frozen=True)
class SyncResult:
    """What a run works with.

    Attributes:
        code: hash of the workspace; empty where it is not known: with ``never``, or of a folder that all hosts see and
            that has more in it than code has.
        cwd: the folder, where the hosts see it themselves; empty where each has a copy, or its own.
        synced: whether each has a copy.
        sent: bytes that went over the network for it.
        seconds: that it took.
    """

    code: str = ""
    cwd: str = ""
    synced: bool = False
    sent: int = 0
    seconds: float = 0.0

    def request(self) -> dict[str, Any]:
        """The fields of a request for a run."""
        return {"code": self.code, "cwd": self.cwd, "synced": self.synced}


def sync_workspace(target: Target, workspace: str, when: When = "auto") -> SyncResult:
    """Have every host see a workspace as it is now.

    Args:
        target: the allocation.
        workspace: a folder; what ``.torchxignore`` and ``.gitignore`` name is left out.
        when: ``auto``, ``always`` or ``never``; see ``When``.

    Raises:
        CodeError: it is not a workspace that can be brought, or a host has no room, or could not write it.
        UnreachableError: the allocation cannot be reached.
        RefusedError: it refuses.
    """
    check_when(when)
    if when == "never":
        return SyncResult()
    from torchx_monarch.code_sync.scan import ScanError

    began, root = time.monotonic(), os.path.abspath(workspace)
    for _ in range(_TRIES):
        with Connection.open(target, {"type": "sync"}) as link:
            if when == "auto" and _is_seen(link, root):
                return SyncResult(_hash_of(root), root, seconds=time.monotonic() - began)
            try:
                tree = look(root)
                sent = _send(link, root, tree)
            except ScanError as error:
                raise CodeError(f"{error} (or run without bringing the code: sync='never')") from None
            except ChangedError as error:
                changing = error
                continue
            except OSError as error:
                raise CodeError(f"cannot read {error.filename} of the workspace: {error.strerror}") from None
            return SyncResult(tree.hash, synced=True, sent=sent, seconds=time.monotonic() - began)
    raise CodeError(
        f"{changing} changes all the time: what is not for the hosts can be named in .torchxignore or .gitignore"
    )


def check_when(when: str) -> None:
    """Refuse what is none of ``When``.

    Raises:
        ValueError: naming those.
    """
    if when not in get_args(When):
        raise ValueError(f"sync={when!r} is none of {', '.join(get_args(When))}")


def current_workspace() -> str | None:
    """The current folder, if it can be one with code alone: not the home folder, and not all of the machine."""
    current = os.getcwd()
    return None if current in ("/", os.path.expanduser("~")) else current


def look(root: str) -> Tree:
    """The tree of a workspace; what was found of it is remembered in the state directory.

    Raises:
        ScanError: it cannot be brought to hosts as it is.
    """
    from torchx_monarch.code_sync.scan import StatCache, scan

    name = hashlib.sha256(os.fsencode(root)).hexdigest()[:32]
    kept = os.path.join(state_files.state_dir(), "sync", f"{name}.json")
    memory = _memories.get(kept) or _memories.setdefault(kept, StatCache.load(kept, root))
    before = memory.files, memory.rules, memory.left_out
    tree = scan(root, memory)
    # To read some files again is quicker than to write all that is known.
    much = len(memory.files.items() ^ before[0].items()) > _READ_AGAIN
    if much or (memory.rules, memory.left_out) != before[1:]:
        memory.save(kept, root)
    return tree


def _hash_of(root: str) -> str:
    """Of a folder that is not to be brought anywhere, and may be anything."""
    from torchx_monarch.code_sync.scan import ScanError

    try:
        return look(root).hash if root not in _not_code else ""
    except ScanError:
        _not_code.add(root)
        return ""


def _is_seen(link: Connection, root: str) -> bool:
    """Whether all hosts see this very folder, under the same path: they see a file that is made in it for a moment."""
    name = os.path.join(root, f"{MARKER}{uuid.uuid4().hex}")
    text = uuid.uuid4().hex
    try:
        with open(name, "x", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o644)) as file:
            file.write(text)
    except OSError:
        return False  # no folder, or none to write in: whether it is the same cannot be told
    try:
        _say(link, {"type": "probe", "path": name, "text": text})
        return _answer(link, "shared")["shared"] is True
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)


def _send(link: Connection, root: str, tree: Tree) -> int:
    """Send what is missing; how many bytes.

    Raises:
        ChangedError: the workspace is no longer what it was.
    """
    base = _brought.get(root)
    _say(link, {"type": "tree", "tree": tree.hash, "base": base.hash if base else ""})
    answer = _answer(link, "have")
    if answer["have"]:
        _brought[root] = tree
        return 0
    encoded = tree.encode(base if answer["base"] else None)
    sent = _send_frames(link, (encoded[at : at + _FRAME] for at in range(0, len(encoded), _FRAME)))
    bits = int(_answer(link, "missing")["missing"], 16)
    missing = [digest for number, digest in enumerate(tree.contents) if bits >> number & 1]
    paths = {entry.content: path for path, entry in tree.entries.items() if entry.is_file}
    files = ((digest, tree.contents[digest], os.path.join(root, paths[digest])) for digest in missing)
    sent += _send_frames(link, pack(files))
    _answer(link, "done")
    _brought[root] = tree
    return sent


def _send_frames(link: Connection, frames: Iterable[bytes]) -> int:
    sent = 0
    for frame in frames:
        sent += len(frame)
        link.send_bytes(len(frame).to_bytes(4, "big") + frame)
    link.send_bytes(bytes(4))
    return sent


def _say(link: Connection, message: dict[str, Any]) -> None:
    import json

    link.send_bytes(json.dumps(message).encode() + b"\n")


def _answer(link: Connection, kind: str) -> dict[str, Any]:
    try:
        answer = link.receive(_ANSWER_TIMEOUT)
    except TimeoutError:
        raise UnreachableError(
            f"the hosts have not said within {_ANSWER_TIMEOUT:g} s that they have the code"
        ) from None
    if answer is None:
        raise UnreachableError("the connection broke while code was brought to the hosts")
    if answer.get("type") == "failed":
        raise CodeError(f"the code was not brought to the hosts: {answer.get('reason')}")
    if answer.get("type") != kind:
        raise UnreachableError(f"the hosts answered {str(answer.get('type'))!r:.40}, not {kind!r}")
    return answer
