# SPDX-License-Identifier: BSD-3-Clause
"""Store the workspaces that a host receives: trees, file contents, and the working folders of runs.

The store belongs to one host process, and its folder is deleted with that process. So the index is in memory only. The
programs that run on the host can reach the folder: a content is checked against its digest whenever it is used. Methods
may be called from any thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from torchx_monarch.code_sync.manifest import ChangedError, Tree, Unpacker, brief, pack
from torchx_monarch.code_sync.work_folder import ContentError, WorkFolder
from torchx_monarch.system import run_dirs

_TREES = 32
"""Number of trees to keep. A client that returns to an earlier state of its code sends nothing, and queued runs find
their code."""


class StoreError(Exception):
    """This host cannot store the code, or does not have it; the message says why."""


class CodeStore:
    """Keep the trees and file contents of one host, and check them out for runs.

    Args:
        folder: path of the store, which is created with mode 0700 when it is needed; must not be shared with another
            host process.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._trees: dict[str, Tree] = {}  # by hash, the most recently used last
        self._contents: set[str] = set()
        self._folders: list[WorkFolder] = []  # the most recently used last
        self._made = 0
        self._unpacker: Unpacker | None = None
        self._incoming: Tree | None = None

    # -- receive a tree ------------------------------------------------------------------------------------------------

    def find_tree(self, tree_hash: str) -> Tree | None:
        """Return a tree; None unless the store has it with all of its contents."""
        with self._lock:
            return self._trees.get(tree_hash)

    def expect(self, tree: Tree) -> list[str]:
        """Prepare to receive the contents of a tree that the store lacks. Cancels an earlier, incomplete transfer.

        Returns:
            The digests of the missing contents, in ascending order.

        Raises:
            StoreError: the disk has too little space, or the folder cannot be created.
        """
        with self._lock, self._as_store_error("make"):
            self.cancel_transfer()
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            missing = {digest: size for digest, size in tree.contents.items() if digest not in self._contents}
            needed, free = sum(missing.values()), _free(self._folder)
            # Twice: the stored contents, and their copies in a working folder.
            if needed * 2 > free:
                raise StoreError(f"{self._folder} has {free} bytes left, and the code needs {needed * 2}")
            self._incoming = tree
            self._unpacker = Unpacker(tree.contents, missing, self._folder, self._keep)
            return list(missing)

    def take(self, piece: bytes) -> None:
        """Unpack a piece of the archive of the expected contents.

        Raises:
            StoreError: no contents are expected, or the piece cannot be written.
            PackError: the piece does not belong to the expected contents.
        """
        with self._lock, self._as_store_error("write"):
            if self._unpacker is None:
                raise StoreError("contents arrived that were not announced")
            self._unpacker.feed(piece)

    def complete(self) -> str:
        """Finish the transfer, and add the expected tree to the store.

        Returns:
            The hash of the tree.

        Raises:
            StoreError: contents of the tree are missing.
        """
        with self._lock:
            if self._incoming is None or self._unpacker is None or self._unpacker.missing:
                missing = self._unpacker.missing if self._unpacker else "all"
                raise StoreError(f"the code is not complete: {missing} contents are missing")
            tree = self._incoming
            self.cancel_transfer()
            self._trees.pop(tree.hash, None)
            self._trees[tree.hash] = tree
            self._prune()
            return tree.hash

    def cancel_transfer(self) -> None:
        """Cancel the current transfer. Contents that are complete stay in the store."""
        with self._lock:
            if self._unpacker is not None:
                self._unpacker.close()
            self._unpacker = self._incoming = None

    # -- send to other hosts -------------------------------------------------------------------------------------------

    def tree(self, tree_hash: str) -> Tree:
        """Return a tree by its hash.

        Raises:
            StoreError: the store does not have it.
        """
        tree = self.find_tree(tree_hash)
        if tree is None:
            raise StoreError(f"the code {brief(tree_hash)} is not on this host (any more): it must be sent again")
        return tree

    def pieces(self, tree: Tree, digests: list[str]) -> Iterator[bytes]:
        """Yield the archive of some contents of a tree, in pieces for ``take``.

        Raises:
            StoreError: a program has changed a content.
        """
        with self._as_store_error("read"):
            try:
                yield from pack((digest, tree.contents[digest], self._content(digest)) for digest in digests)
            except ChangedError as error:
                path = str(error)
                raise ContentError(os.path.basename(path), path) from None

    # -- working folders of runs ---------------------------------------------------------------------------------------

    def acquire(self, tree_hash: str, workspace: str = "") -> str:
        """Check out a tree for a run, and return the path of the folder. Active runs of the same tree share a folder.

        Args:
            workspace: the workspace of the run, which finds no files of other workspaces' runs in its folder.

        Raises:
            StoreError: the store does not have the tree, a program has changed a content, or the folder cannot be
                written.
        """
        with self._lock, self._as_store_error("make"):
            tree = self.tree(tree_hash)
            own = [work_folder for work_folder in self._folders if work_folder.workspace == workspace]
            folder = next(
                (work_folder for work_folder in own if work_folder.tree == tree_hash and work_folder.users), None
            )
            if folder is None:
                folder = self._choose_folder(tree_hash, workspace)
                is_held = folder.tree == tree_hash
                folder.checkout(tree, self._content)
                if not is_held:
                    self._name(folder, brief(tree_hash))
            self._folders.remove(folder)
            self._folders.append(folder)
            folder.users += 1
            self._trees[tree_hash] = self._trees.pop(tree_hash)
            self._prune()
            return folder.path

    def release(self, path: str) -> None:
        """Record that a run no longer uses the folder that ``acquire`` returned."""
        with self._lock:
            for folder in self._folders:
                if folder.path == path:
                    folder.users -= 1

    def _choose_folder(self, tree_hash: str, workspace: str) -> WorkFolder:
        """Choose an unused folder of a workspace: one that holds the tree, else the last one used, else a new one."""
        idle = [folder for folder in self._folders if not folder.users and folder.workspace == workspace]
        chosen = next((folder for folder in idle if folder.tree == tree_hash), idle[-1] if idle else None)
        if chosen is None:
            self._made += 1
            chosen = WorkFolder(os.path.join(self._folder, f"new-{self._made}"), workspace)
            self._folders.append(chosen)
        elif chosen.tree != tree_hash:
            self._made += 1
            self._name(chosen, f"new-{self._made}")  # a half-written folder must not have the name of a tree
        return chosen

    def _name(self, folder: WorkFolder, name: str) -> None:
        path = os.path.join(self._folder, name)
        # The same tree, another workspace.
        if any(other.path == path for other in self._folders if other is not folder):
            path = f"{path}-{self._made}"
        if folder.path != path:
            if os.path.lexists(path):  # left by an aborted run
                raise StoreError(f"{path} is in the way")
            os.rename(folder.path, path)
            folder.path = path

    # -- disk space ----------------------------------------------------------------------------------------------------

    def _prune(self) -> None:
        """Delete the oldest trees, contents that no tree needs, and unused folders without outputs of a run."""
        used = {folder.tree for folder in self._folders if folder.users}
        for old in list(self._trees)[:-_TREES]:
            if old not in used:
                del self._trees[old]
        idle = [folder for folder in self._folders if not folder.users]
        for folder in idle[:-1]:
            if not folder.has_outputs():
                run_dirs.remove_tree(folder.path)
                self._folders.remove(folder)
        trees = [*self._trees.values(), *([self._incoming] if self._incoming is not None else [])]
        needed = {digest for tree in trees for digest in tree.contents}
        for digest in self._contents - needed:
            with contextlib.suppress(OSError):
                os.unlink(self._content(digest))
            self._contents.discard(digest)

    def _content(self, digest: str) -> str:
        return os.path.join(self._folder, digest)

    def _forget(self, digest: str) -> None:
        """Delete a content that a program has changed, and the trees that need it."""
        path = self._content(digest)
        with self._lock:
            self._contents.discard(digest)
            self._trees = {key: tree for key, tree in self._trees.items() if digest not in tree.contents}
            run_dirs.remove_tree(path)

    def _keep(self, digest: str, path: str) -> None:
        os.rename(path, self._content(digest))
        self._contents.add(digest)

    @contextlib.contextmanager
    def _as_store_error(self, what: str) -> Iterator[None]:
        try:
            yield
        except ContentError as error:
            self._forget(error.digest)
            raise StoreError(f"{error.strerror}: {error.filename}: the code must be sent again") from None
        except OSError as error:
            where = error.filename or self._folder
            raise StoreError(f"cannot {what} the code on this host: {error.strerror}: {where}") from None


def _free(folder: str) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
