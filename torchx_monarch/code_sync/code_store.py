# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What one host keeps of the workspaces that it was sent: trees, the contents of their files, and folders to work in.

All of it belongs to one life of one host process, in a folder of its own that goes with it. So nothing is read back
from the disk; what is not known in memory is not there. Methods may be called from any thread.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator

from torchx_monarch.code_sync.archive import Unpacker, pack
from torchx_monarch.code_sync.manifest import Tree, brief
from torchx_monarch.code_sync.work_folder import WorkFolder

_TREES = 32
"""How many trees are kept: who goes back to an earlier state sends nothing, and runs may wait for others."""


class StoreError(Exception):
    """The code cannot be kept or handed out here; the message says why."""


class CodeStore:
    """The store.

    Args:
        folder: to be made, mode 0700; of a life of a host alone.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._trees: dict[str, Tree] = {}  # the newest last
        self._contents: set[str] = set()
        self._folders: list[WorkFolder] = []  # the last used last
        self._made = 0
        self._unpacker: Unpacker | None = None
        self._coming: Tree | None = None

    # -- what comes ----------------------------------------------------------------------------------------------------

    def known(self, tree_hash: str) -> Tree | None:
        """A tree, if it is here with all that belongs to it."""
        with self._lock:
            return self._trees.get(tree_hash)

    def expect(self, tree: Tree) -> list[str]:
        """Be ready for the contents of a tree that are not here; those that did not all come before are forgotten.

        Returns:
            their digests, in order.

        Raises:
            StoreError: there is no room for them.
        """
        with self._lock, self._telling("make"):
            self.forget_coming()
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            missing = {digest: size for digest, size in tree.contents.items() if digest not in self._contents}
            needed, free = sum(missing.values()), _free(self._folder)
            # What is kept, and a copy to work in.
            if needed * 2 > free:
                raise StoreError(f"{self._folder} has {free} bytes left, and the code needs {needed * 2}")
            self._coming = tree
            self._unpacker = Unpacker(tree.contents, missing, self._folder, self._keep)
            return list(missing)

    def take(self, piece: bytes) -> None:
        """Take a piece of the contents that are expected.

        Raises:
            StoreError: it cannot be written.
            PackError: it is something else.
        """
        with self._lock, self._telling("write"):
            if self._unpacker is None:
                raise StoreError("contents came that nobody had announced")
            self._unpacker.feed(piece)

    def complete(self) -> str:
        """The tree that was expected is here.

        Returns:
            its hash.

        Raises:
            StoreError: not all of its contents have come.
        """
        with self._lock:
            if self._coming is None or self._unpacker is None or self._unpacker.missing:
                missing = self._unpacker.missing if self._unpacker else "all"
                raise StoreError(f"the code is not complete: {missing} contents are missing")
            tree = self._coming
            self.forget_coming()
            self._trees.pop(tree.hash, None)
            self._trees[tree.hash] = tree
            self._prune()
            return tree.hash

    def forget_coming(self) -> None:
        """Those who send have given up. What has come of the contents is kept."""
        with self._lock:
            if self._unpacker is not None:
                self._unpacker.close()
            self._unpacker = self._coming = None

    # -- what goes on to the others ------------------------------------------------------------------------------------

    def tree(self, tree_hash: str) -> Tree:
        """A tree that is here.

        Raises:
            StoreError: it is not.
        """
        tree = self.known(tree_hash)
        if tree is None:
            raise StoreError(f"the code {brief(tree_hash)} is not on this host (any more): it must be sent again")
        return tree

    def pieces(self, tree: Tree, digests: list[str]) -> Iterator[bytes]:
        """Some of its contents, as ``take`` takes them."""
        return pack((digest, tree.contents[digest], self._content(digest)) for digest in digests)

    # -- what runs work in ---------------------------------------------------------------------------------------------

    def acquire(self, tree_hash: str) -> str:
        """A folder that holds a tree, for a run; the same as for another of that tree that still runs.

        Raises:
            StoreError: the tree is not here, or the folder cannot be made.
        """
        with self._lock, self._telling("make"):
            tree = self.tree(tree_hash)
            folder = next((each for each in self._folders if each.tree == tree_hash and each.users), None)
            if folder is None:
                folder = self._idle(tree_hash)
                folder.checkout(tree, self._content)
                self._name(folder, brief(tree_hash))
            self._folders.remove(folder)
            self._folders.append(folder)
            folder.users += 1
            self._trees[tree_hash] = self._trees.pop(tree_hash)
            self._prune()
            return folder.path

    def release(self, path: str) -> None:
        """The run that got this folder is over."""
        with self._lock:
            for folder in self._folders:
                if folder.path == path:
                    folder.users -= 1

    def _idle(self, tree_hash: str) -> WorkFolder:
        """The folder to bring to a tree: the one that holds it, else the last that was used, else a new one."""
        idle = [each for each in self._folders if not each.users]
        chosen = next((each for each in idle if each.tree == tree_hash), idle[-1] if idle else None)
        if chosen is None:
            self._made += 1
            chosen = WorkFolder(os.path.join(self._folder, f"new-{self._made}"))
            self._folders.append(chosen)
        elif chosen.tree != tree_hash:
            self._made += 1
            self._name(chosen, f"new-{self._made}")  # nobody sees half of it under the name of either
        return chosen

    def _name(self, folder: WorkFolder, name: str) -> None:
        path = os.path.join(self._folder, name)
        if folder.path != path:
            if os.path.lexists(path):  # of a run that was left half-way
                raise StoreError(f"{path} is in the way")
            os.rename(folder.path, path)
            folder.path = path

    # -- room ----------------------------------------------------------------------------------------------------------

    def _prune(self) -> None:
        """Remove what is of no use any more: old trees, contents of no tree, folders with nothing of a run's own."""
        used = {folder.tree for folder in self._folders if folder.users}
        for old in list(self._trees)[:-_TREES]:
            if old not in used:
                del self._trees[old]
        idle = [each for each in self._folders if not each.users]
        for folder in idle[:-1]:
            if not folder.has_outputs():
                shutil.rmtree(folder.path, ignore_errors=True)
                self._folders.remove(folder)
        needed = {digest for tree in self._trees.values() for digest in tree.contents}
        for digest in self._contents - needed:
            with contextlib.suppress(OSError):
                os.unlink(self._content(digest))
            self._contents.discard(digest)

    def _content(self, digest: str) -> str:
        return os.path.join(self._folder, digest)

    def _keep(self, digest: str, path: str) -> None:
        os.rename(path, self._content(digest))
        self._contents.add(digest)

    @contextlib.contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = error.filename or self._folder
            raise StoreError(f"cannot {what} the code on this host: {error.strerror}: {where}") from None


def _free(folder: str) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
