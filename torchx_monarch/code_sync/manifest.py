# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a workspace consists of, file by file, and the hash of it all that is recorded with a run.

Paths are relative, with ``/``; bytes that are no UTF-8 stand in them as Python's surrogate escapes. Of a mode only
counts whether its user may execute the file, as with git; of times nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

FILE, EXECUTABLE, LINK, FOLDER = "f", "x", "l", "d"

MARKER = ".torchx-monarch-"
"""How the files begin that clients make in a workspace for a moment; they are none of it."""

MAX_ENTRIES = 200_000
"""Files, links and empty folders of a workspace. One with more of them is hardly code."""

MAX_TREE = 100 << 20
"""Bytes of the text of a tree; 200,000 paths of 400 characters."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_NO_PATH = re.compile(r"\0|(^|/)\.{0,2}(/|\Z)")


class TreeError(ValueError):
    """What came is no tree that may be made on a disk; the message says why."""


class Entry(NamedTuple):
    """One thing of a workspace.

    Attributes:
        kind: ``FILE``, ``EXECUTABLE``, ``LINK``, or ``FOLDER`` for one in which there is nothing else of the tree.
        content: SHA-256 of a file in hex; what a link points to; nothing for a folder.
        size: of a file, in bytes; else 0.
    """

    kind: str
    content: str
    size: int

    @property
    def is_file(self) -> bool:
        """Whether it has a content that is to be sent."""
        return self.kind in (FILE, EXECUTABLE)


@dataclasses.dataclass(frozen=True)
class Tree:
    """All of a workspace.

    Attributes:
        entries: by path.
    """

    entries: Mapping[str, Entry]

    @functools.cached_property
    def hash(self) -> str:
        """SHA-256 in hex over all paths, kinds, contents and links: two trees are the same if this is."""
        # None of the three can hold a zero byte, so no two trees give the same text.
        text = "\0".join(f"{path}\0{entry.kind}\0{entry.content}" for path, entry in sorted(self.entries.items()))
        return hashlib.sha256(_raw(text)).hexdigest()

    @functools.cached_property
    def contents(self) -> dict[str, int]:
        """The sizes of the files' different contents by digest, in the order of the digests."""
        return dict(sorted((entry.content, entry.size) for entry in self.entries.values() if entry.is_file))

    @property
    def size(self) -> int:
        """Bytes of the files in all."""
        return sum(entry.size for entry in self.entries.values())

    def encode(self, base: Tree | None = None) -> bytes:
        """As bytes that ``decode`` reads; what differs from another tree, if one is given."""
        before = base.entries if base is not None else {}
        values = {
            "base": base.hash if base is not None else "",
            "gone": [path for path in before if path not in self.entries],
            "entries": {path: entry for path, entry in self.entries.items() if before.get(path) != entry},
        }
        return zlib.compress(json.dumps(values, separators=(",", ":")).encode(), 1)

    @classmethod
    def decode(cls, data: bytes, known: Callable[[str], Tree | None] = lambda base: None) -> Tree:
        """The inverse of ``encode``, for bytes that may be anything.

        Args:
            data: the bytes.
            known: the tree of a hash, if it is known here.

        Raises:
            TreeError: they are no tree, or one that would reach out of its folder, or differ from one unknown here.
        """
        try:
            unpacker = zlib.decompressobj()
            text = unpacker.decompress(data, MAX_TREE)
            if not unpacker.eof:
                raise TreeError(f"a tree whose text is cut off, or longer than {MAX_TREE} bytes")
            values = json.loads(text)
        except (zlib.error, ValueError, RecursionError) as error:
            raise TreeError(f"not a tree: {error}") from None
        if not isinstance(values, dict) or not isinstance(values.get("entries"), dict):
            raise TreeError("a tree is an object with entries")
        if not isinstance(values.get("gone", []), list):
            raise TreeError("what a tree lacks of another is a list")
        entries: dict[str, Entry] = {}
        if base := values.get("base"):
            if (before := known(str(base))) is None:
                raise TreeError(f"a tree that differs from {brief(str(base))}, which is not here")
            entries.update(before.entries)
            for path in values.get("gone", ()):
                entries.pop(str(path), None)
        entries.update((path, _entry(path, value)) for path, value in values["entries"].items())
        if len(entries) > MAX_ENTRIES:
            raise TreeError(f"a tree has at most {MAX_ENTRIES} entries")
        tree = cls(entries)
        tree.check()
        return tree

    def check(self) -> None:
        """Make sure that it can be made in a folder, and that nothing of it lies outside.

        Raises:
            TreeError: naming the path.
        """
        sizes: dict[str, int] = {}
        folders = {""}
        for path, (kind, content, size) in self.entries.items():
            if _NO_PATH.search(path) or "\0" in content:
                raise TreeError(f"{path!r} is no path below a workspace")
            above = path.rpartition("/")[0]
            while above not in folders:
                folders.add(above)
                above = above.rpartition("/")[0]
            if kind in (FILE, EXECUTABLE) and sizes.setdefault(content, size) != size:
                raise TreeError(f"{path!r} has another size than a file of the same content")
        if wrong := folders & self.entries.keys():
            raise TreeError(f"something lies below {min(wrong)!r}, which is no folder with something in it")


def brief(tree_hash: str) -> str:
    """A tree's hash as a person sees it."""
    return tree_hash[:12]


def _entry(path: str, value: object) -> Entry:
    if not isinstance(value, list) or len(value) != 3:
        raise TreeError(f"{path!r} has no entry of three values")
    kind, content, size = value
    if kind not in (FILE, EXECUTABLE, LINK, FOLDER) or type(content) is not str or type(size) is not int or size < 0:
        raise TreeError(f"{path!r} has no entry of a tree")
    if kind in (FILE, EXECUTABLE):
        if not _DIGEST.fullmatch(content):
            raise TreeError(f"{path!r} has no content that can be")
    elif size or (kind == LINK) != bool(content):
        raise TreeError(f"{path!r} points nowhere" if kind == LINK else f"{path!r} is a folder with a content")
    return Entry(kind, content, size)


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
