# SPDX-License-Identifier: BSD-3-Clause
"""Write trees into new folders, and replace the code in the folder in which the runs of a workspace work.

The files are copies of the stored contents, not links to them, because a run may write to its files and must not change
the store.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from torchx_monarch.code_sync.manifest import EXECUTABLE, FOLDER, LINK, Tree
from torchx_monarch.system import safe_files

_BYTECODE = "__pycache__"
"""It goes with the code: Python compares it with the size and the whole seconds of its source, and a source can be
replaced within a second."""


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


def write_tree(tree: Tree, folder: str, content: Callable[[str], bytes]) -> None:
    """Write a tree into a folder, which is created.

    Args:
        content: called with a digest; returns that content.
    """
    os.mkdir(folder, 0o700)
    root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for path in sorted(tree.parents):
            os.mkdir(path, 0o700, dir_fd=root)
        for path, entry in tree.entries.items():
            if entry.kind == FOLDER:
                os.mkdir(path, 0o700, dir_fd=root)
            elif entry.kind == LINK:
                os.symlink(entry.content, path, dir_fd=root)
            else:
                mode = 0o700 if entry.kind == EXECUTABLE else 0o600
                target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=root)
                try:
                    safe_files.write_all(target, content(entry.content))
                finally:
                    os.close(target)
    finally:
        os.close(root)
