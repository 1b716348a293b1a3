# SPDX-License-Identifier: BSD-3-Clause
"""Store the workspaces that a host receives: uploads, trees, and the folders in which runs work.

The store of a host belongs to one process, and its folder is deleted with that process. So its index is in memory only.
Its methods may be called from any thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import threading
from collections import OrderedDict

from torchx_monarch.code_sync.manifest import Tree
from torchx_monarch.code_sync.upload import Upload, UploadError
from torchx_monarch.system import run_dirs, safe_files

_TREES = 32
"""Number of trees to keep. A client that returns to an earlier state of its code sends nothing, and queued runs find
their code."""

_UPLOADS = 64
"""Number of uploads of which contents are not sent again. Each has open files."""

_WORKSPACES = 10
"""Number of workspaces of which the folder is kept, with the results of their runs."""

_BYTECODE = "__pycache__"
"""It goes with the code: Python compares it with the size and the whole seconds of its source, and a source can be
replaced within a second."""


class CodeStore:
    """Keep the workspaces of one host, and check them out for runs.

    The folder is created with mode 0700 when it is needed; it must not be shared with another host process.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._lock = threading.RLock()
        self._trees = OrderedDict[str, list[Upload]]()  # by hash, the most recently used last
        self._folders = OrderedDict[str, WorkFolder]()  # by workspace, the most recently used last

    def has(self, tree_hash: str) -> bool:
        """Whether the store has a tree with all of its contents. It waits for no other method."""
        return tree_hash in self._trees

    def find(self, tree_hash: str) -> list[Upload]:
        """Return the upload of a tree and then those with its other contents. It waits for no other method."""
        if tree_hash not in self._trees:
            raise UploadError(f"the code {tree_hash:.12} is not on this host (any more): it must be sent again")
        return self._trees[tree_hash]

    def uploads(self) -> list[Upload]:
        """Return the uploads with contents of all trees, the newest last."""
        with self._lock:
            named = {upload.name: upload for uploads in self._trees.values() for upload in uploads}
        return [named[name] for name in sorted(named)]

    def digests(self) -> list[str]:
        """Return the first 16 digits of the digests of contents that need not be sent."""
        return [digest[:16] for upload in self.uploads()[-_UPLOADS:] for digest in upload.contents]

    def new_upload(self, name: str, size: int) -> Upload:
        """Return an empty upload with space for its size in bytes; raise an ``OSError`` if there is none."""
        self._make_room(size)
        return Upload(self.folder, name, size)

    def add(self, tree_hash: str, received: list[Upload]) -> None:
        """Add a tree that was received, and delete the oldest trees, with the uploads that no tree needs any more."""
        for upload in received:
            upload.unpack(self._make_room)
        uploads = [*self.uploads(), *received]
        own = next((upload for upload in uploads if upload.tree.hash == tree_hash), None)
        sources = {digest: upload for upload in uploads for digest in upload.contents}
        if own is None or not own.tree.contents.keys() <= sources.keys():
            raise UploadError(f"the code {tree_hash:.12} has not arrived as a whole")
        needed = {upload.name: upload for upload in (own, *(sources[digest] for digest in own.tree.contents))}
        with self._lock:
            self._trees[tree_hash] = list(needed.values())
            self._trees.move_to_end(tree_hash)
            while len(self._trees) > _TREES:
                self._trees.popitem(last=False)

    def checkout(self, tree_hash: str, workspace: str = "") -> tuple[str, str]:
        """Check out a tree for a run into the folder of its workspace. No other run may use the folder.

        A run finds no files of other workspaces' runs in it.

        Returns:
            The path of the folder, and that of a folder with what nobody needs any more, which the caller removes.
        """
        with self._lock:
            uploads = self.find(tree_hash)
            tree = uploads[0].tree
            self._trees.move_to_end(tree_hash)
            if workspace not in self._folders:
                self._folders[workspace] = WorkFolder(tempfile.mkdtemp(prefix="workspace-", dir=self.folder))
            self._folders.move_to_end(workspace)
            folder = self._folders[workspace]
            self._make_room(tree.size)
            sources = {digest: upload for upload in uploads for digest in upload.contents}
            aside = tempfile.mkdtemp(prefix="aside-", dir=self.folder)
            try:
                new, old = os.path.join(aside, "new"), os.path.join(aside, "old")
                tree.write(new, lambda digest: sources[digest].content(digest))
                os.mkdir(old)
                folder.replace_code(tree, new, old)
                while len(self._folders) > _WORKSPACES:
                    path = self._folders.popitem(last=False)[1].path
                    with contextlib.suppress(FileNotFoundError):  # a run has removed it
                        os.rename(path, os.path.join(aside, os.path.basename(path)))
            except BaseException:
                run_dirs.remove_tree(aside)
                raise
            return folder.path, aside

    def _make_room(self, needed: int) -> None:
        """Remove the folders of the least recently used workspaces, but for the last one, until there is space.

        Args:
            needed: bytes.
        """
        with self._lock:
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            while needed > (free := shutil.disk_usage(self.folder).free):
                if len(self._folders) < 2:
                    reason = f"no space left: {free} bytes, and the code needs {needed}"
                    raise OSError(errno.ENOSPC, reason, self.folder)
                run_dirs.remove_tree(self._folders.popitem(last=False)[1].path)


class WorkFolder:
    """A folder in which the runs of a workspace work, one after the other. Its path stays the same."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._code = {_BYTECODE}

    def replace_code(self, tree: Tree, new: str, old: str) -> None:
        """Replace the code of the run before; keep what runs have left beside it, such as results and checkpoints.

        No run may use the folder meanwhile. After an error, it can be repeated with this tree or another.

        Args:
            new: path of a folder with the tree, which is moved out of it.
            old: path of an empty folder, into which the code of the run before is moved.
        """
        code = tree.names_with_files | {_BYTECODE}
        self._code |= code
        os.makedirs(self.path, mode=0o700, exist_ok=True)  # a run may have removed it
        folder = safe_files.open_folder(self.path, below=os.path.dirname(self.path))
        try:
            for name in self._code:
                with contextlib.suppress(FileNotFoundError):
                    os.rename(name, os.path.join(old, name), src_dir_fd=folder)
            kept = os.listdir(folder)
            for name in os.listdir(new):
                if name not in kept:  # it is an empty folder of the tree, in which runs have left results
                    os.rename(os.path.join(new, name), name, dst_dir_fd=folder)
        finally:
            os.close(folder)
        self._code = code
