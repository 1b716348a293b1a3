# SPDX-License-Identifier: BSD-3-Clause
"""The contents of workspaces on a machine, which apps share, and their copies for replicas.

A content is a file whose name is its SHA-256, in the folder ``code`` of the state directory, for as long as it was
used in the last ``state_files.keep_days()``. Standard library only, as all of ``in_job``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time

from torchx_monarch.backends.core import state_files
from torchx_monarch.code_sync.archive import Unpacker
from torchx_monarch.code_sync.manifest import Tree
from torchx_monarch.code_sync.work_folder import WorkFolder
from torchx_monarch.system import run_dirs, safe_files

_INCOMING = ".new-"


class Code:
    """The workspaces that one connection has brought."""

    def __init__(self) -> None:
        self._folder = os.path.join(state_files.state_dir(), "code")
        self._trees: dict[str, Tree] = {}
        self._incoming = ""
        self._unpacker: Unpacker | None = None

    def expect(self, encoded: bytes) -> list[str]:
        """Prepare to receive a workspace, and return the digests of the contents that are not here.

        Args:
            encoded: its ``Tree``, encoded.

        Raises:
            TreeError: it is none.
            OSError: the disk has too little space, or the folder cannot be made or belongs to another user.
        """
        self.close()
        tree = Tree.decode(encoded)
        state_files.make_folder("code")
        self._remove_old()
        missing = {digest: size for digest, size in tree.contents.items() if not self._has(digest, size)}
        free = os.statvfs(self._folder)
        needed = sum(missing.values()) + sum(entry.size for entry in tree.entries.values())
        if needed > free.f_bavail * free.f_frsize:
            raise OSError(f"no space left in {self._folder} for the workspace, which needs {needed >> 20} MiB")
        self._incoming = tempfile.mkdtemp(prefix=_INCOMING, dir=self._folder)
        self._unpacker = Unpacker(tree.contents, missing, self._incoming, self._keep)
        self._trees[tree.hash] = tree
        return list(missing)

    def take(self, piece: bytes) -> None:
        """Receive a piece of the archive of the expected contents.

        Raises:
            PackError: it is none.
            OSError: it cannot be written.
        """
        if self._unpacker is not None:
            self._unpacker.feed(piece)

    def check_out(self, tree_hash: str, folder: str) -> None:
        """Make a folder with a workspace that was received.

        Raises:
            OSError: a content was not received, or the folder cannot be written.
        """
        WorkFolder(folder).checkout(self._trees[tree_hash], self._path)

    def close(self) -> None:
        """Remove what is not complete."""
        if self._unpacker is not None:
            self._unpacker.close()
        if self._incoming:
            run_dirs.remove_tree(self._incoming)
        self._unpacker, self._incoming = None, ""

    def _path(self, digest: str) -> str:
        return os.path.join(self._folder, digest)

    def _keep(self, digest: str, path: str) -> None:
        os.rename(path, self._path(digest))

    def _has(self, digest: str, size: int) -> bool:
        """Return whether a content is here as it was sent: a machine that lost its power may have lost some of it."""
        found = hashlib.sha256()
        try:
            with open(safe_files.open_file(self._path(digest)), "rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size != size:
                    return False
                os.utime(file.fileno())
                while data := file.read(1 << 20):
                    found.update(data)
        except OSError:
            return False
        return found.hexdigest() == digest

    def _remove_old(self) -> None:
        oldest = time.time() - max(state_files.keep_days(), 1.0) * 86400
        for name in state_files.names_in(self._folder):
            path = os.path.join(self._folder, name)
            with contextlib.suppress(OSError):
                if os.stat(path, follow_symlinks=False).st_mtime < oldest:
                    if name.startswith(_INCOMING):
                        run_dirs.remove_tree(path)
                    else:
                        os.unlink(path)
