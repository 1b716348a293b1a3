# SPDX-License-Identifier: BSD-3-Clause
"""The workspaces that a connection brings, by the contents of their files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time

from torchx_monarch.backends.core import state_files
from torchx_monarch.code_sync.code_store import ContentStore
from torchx_monarch.code_sync.manifest import Tree
from torchx_monarch.code_sync.work_folder import WorkFolder
from torchx_monarch.system import run_dirs, safe_files


class Code(ContentStore):
    """The workspaces that one connection has brought, in folders for replicas."""

    def __init__(self) -> None:
        super().__init__(os.path.join(state_files.state_dir(), "code"))
        self._trees: dict[str, Tree] = {}
        self._incoming = ""

    def expect(self, encoded: bytes) -> list[str]:
        """Prepare to receive a workspace, a ``Tree``; return the digests of the contents that are not here."""
        tree = Tree.decode(encoded)
        state_files.make_folder("code")
        oldest = time.time() - max(state_files.keep_days(), 1.0) * 86400
        for name in state_files.names_in(self.folder):
            with contextlib.suppress(OSError):
                if os.stat(self.path(name), follow_symlinks=False).st_mtime < oldest:
                    run_dirs.remove_tree(self.path(name))
        self._trees[tree.hash] = tree
        stored = {digest for digest in tree.contents if self._has(digest)}
        missing = self.receive(tree, stored, incoming := tempfile.mkdtemp(prefix=".new-", dir=self.folder))
        self._incoming = incoming
        return missing

    def cancel_transfer(self) -> None:
        """Cancel the current transfer, and remove its folder, which is this connection's own."""
        super().cancel_transfer()
        if self._incoming:
            run_dirs.remove_tree(self._incoming)
        self._incoming = ""

    def check_out(self, tree_hash: str, folder: str) -> None:
        """Make a folder with a workspace that was received."""
        WorkFolder(folder).checkout(self._trees[tree_hash], self.path)

    def _has(self, digest: str) -> bool:
        """Return whether a content is here as it was sent: a machine that lost its power may have lost some of it."""
        found = hashlib.sha256()
        try:
            with open(safe_files.open_file(self.path(digest)), "rb", buffering=0) as file:
                os.utime(file.fileno())
                while data := file.read(1 << 20):
                    found.update(data)
        except OSError:
            return False
        return found.hexdigest() == digest
