# SPDX-License-Identifier: BSD-3-Clause
"""Store the workspaces that a host receives: trees, file contents, and the working folders of runs.

The store of a host belongs to one process, and its folder is deleted with that process. So its index is in memory only.
Its methods may be called from any thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
from collections.abc import Container, Iterator

from torchx_monarch.code_sync.manifest import ChangedError, PackError, Tree, Unpacker, pack
from torchx_monarch.code_sync.work_folder import WorkFolder, write_tree
from torchx_monarch.system import run_dirs

_TREES = 32
"""Number of trees to keep. A client that returns to an earlier state of its code sends nothing, and queued runs find
their code."""

_WORKSPACES = 10
"""Number of workspaces of which the folder is kept, with the results of their runs."""


class StoreError(Exception):
    """This host cannot store the code, or does not have it; the message says why."""


class ContentStore:
    """The contents of files in a folder, by their digests."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._unpacker: Unpacker | None = None

    def path(self, digest: str) -> str:
        """Return the path of a content."""
        return os.path.join(self.folder, digest)

    def receive(self, tree: Tree, stored: Container[str], incoming: str) -> list[str]:
        """Prepare to receive the contents of a tree that are not stored; cancel an earlier, incomplete transfer.

        Args:
            incoming: a folder on the same file system, for contents that are not complete.

        Returns:
            The digests of the missing contents, in ascending order.
        """
        self.cancel_transfer()
        missing = {digest: size for digest, size in tree.contents.items() if digest not in stored}
        self.make_room(sum(missing.values()) + tree.size)  # the contents, and a copy of all files for a run
        self._unpacker = Unpacker(missing, incoming, self.keep)
        return list(missing)

    def make_room(self, needed: int) -> None:
        """Raise an ``OSError`` if there is no space for so many bytes."""
        status = os.statvfs(self.folder)
        if needed > (free := status.f_bavail * status.f_frsize):
            reason = f"no space left: {free} bytes, and the code needs {needed}"
            raise OSError(errno.ENOSPC, reason, self.folder)

    def keep(self, digest: str, path: str) -> None:
        """Store a content that is complete."""
        os.rename(path, self.path(digest))

    def take(self, piece: bytes) -> None:
        """Unpack a piece of the expected contents; raise ``PackError`` if it is none."""
        if self._unpacker is None:
            raise PackError("contents arrived that were not announced")
        self._unpacker.feed(piece)

    def cancel_transfer(self) -> None:
        """Cancel the current transfer. Contents that are complete stay in the store."""
        if self._unpacker is not None:
            self._unpacker.close()
        self._unpacker = None


class CodeStore(ContentStore):
    """Keep the trees and file contents of one host, and check them out for runs.

    The folder is created with mode 0700 when it is needed; it must not be shared with another host process.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self._lock = threading.RLock()
        self._trees: dict[str, Tree] = {}  # by hash, the most recently used last
        self._contents: set[str] = set()
        self._folders: dict[str, WorkFolder] = {}  # by workspace, the most recently used last
        self._incoming: Tree | None = None

    # -- receive a tree ------------------------------------------------------------------------------------------------

    def find_tree(self, tree_hash: str) -> Tree | None:
        """Return a tree; None unless the store has it with all of its contents. It waits for no other method."""
        return self._trees.get(tree_hash)

    def expect(self, tree: Tree) -> list[str]:
        """Prepare to receive the contents of a tree that the store lacks; return their digests, as ``receive`` does."""
        with self._lock, self._as_store_error("make"):
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            missing = self.receive(tree, self._contents, self.folder)
            self._incoming = tree
            return missing

    def keep(self, digest: str, path: str) -> None:
        super().keep(digest, path)
        self._contents.add(digest)

    def take(self, piece: bytes) -> None:
        with self._lock, self._as_store_error("write"):
            super().take(piece)

    def complete(self) -> None:
        """Finish the transfer, add the expected tree, and delete the oldest trees and what no tree needs any more."""
        with self._lock:
            tree = self._incoming
            if tree is None or self._unpacker is None or self._unpacker.missing:
                missing = self._unpacker.missing if self._unpacker else "all"
                raise StoreError(f"the code is not complete: {missing} contents are missing")
            self.cancel_transfer()
            self._trees.pop(tree.hash, None)
            self._trees[tree.hash] = tree
            for old in list(self._trees)[:-_TREES]:
                del self._trees[old]
            for digest in self._contents.difference(*(other.contents for other in self._trees.values())):
                with contextlib.suppress(OSError):
                    os.unlink(self.path(digest))
                self._contents.discard(digest)

    def cancel_transfer(self) -> None:
        with self._lock:
            super().cancel_transfer()
            self._incoming = None

    # -- send to other hosts -------------------------------------------------------------------------------------------

    def tree(self, tree_hash: str) -> Tree:
        """Return a tree by its hash; raise ``StoreError`` unless the store has it."""
        tree = self.find_tree(tree_hash)
        if tree is None:
            raise StoreError(f"the code {tree_hash:.12} is not on this host (any more): it must be sent again")
        return tree

    def sendable(self, tree_hash: str) -> Tree:
        """Return a tree that is here or arrives; raise ``StoreError`` if there is none of this hash."""
        incoming = self._incoming
        return incoming if incoming is not None and incoming.hash == tree_hash else self.tree(tree_hash)

    def holds(self, digest: str) -> bool:
        return digest in self._contents

    def pieces(self, tree: Tree, digests: list[str]) -> Iterator[bytes]:
        """Yield some contents of a tree, in pieces for ``take``."""
        with self._as_store_error("read"):
            try:
                yield from pack((digest, tree.contents[digest], self.path(digest)) for digest in digests)
            except ChangedError as error:
                what = f"a program has changed the code on this host: {error}"
                raise StoreError(f"{what}: release these hosts and start others") from None

    # -- working folders of runs ---------------------------------------------------------------------------------------

    def checkout(self, tree_hash: str, workspace: str = "") -> tuple[str, str]:
        """Check out a tree for a run into the folder of its workspace. No other run may use the folder.

        A run finds no files of other workspaces' runs in it.

        Returns:
            The path of the folder, and that of a folder with what nobody needs any more, which the caller removes.
        """
        with self._lock, self._as_store_error("make"):
            tree = self.tree(tree_hash)
            self._trees[tree_hash] = self._trees.pop(tree_hash)
            if workspace in self._folders:
                self._folders[workspace] = self._folders.pop(workspace)
            self.make_room(tree.size)
            aside = tempfile.mkdtemp(prefix="aside-", dir=self.folder)
            try:
                new, old = os.path.join(aside, "new"), os.path.join(aside, "old")
                write_tree(tree, new, self.path)
                os.mkdir(old)
                if workspace not in self._folders:
                    self._folders[workspace] = WorkFolder(tempfile.mkdtemp(prefix="workspace-", dir=self.folder))
                folder = self._folders[workspace]
                folder.replace_code(tree, new, old)
                for unused in list(self._folders)[:-_WORKSPACES]:
                    path = self._folders.pop(unused).path
                    with contextlib.suppress(FileNotFoundError):  # a run has removed it
                        os.rename(path, os.path.join(aside, os.path.basename(path)))
            except BaseException:
                run_dirs.remove_tree(aside)
                raise
            return folder.path, aside

    def make_room(self, needed: int) -> None:
        """Remove the folders of the least recently used workspaces, but for the last one, until there is space."""
        while True:
            try:
                return super().make_room(needed)
            except OSError:
                if len(self._folders) < 2:
                    raise
            run_dirs.remove_tree(self._folders.pop(next(iter(self._folders))).path)

    @contextlib.contextmanager
    def _as_store_error(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = error.filename or self.folder
            raise StoreError(f"cannot {what} the code on this host: {error.strerror}: {where}") from None
