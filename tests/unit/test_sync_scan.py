# SPDX-License-Identifier: BSD-3-Clause
"""What of a workspace is taken, and that nothing is missed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_sync_store import write
from tests.waits import WITHIN
from torchx_monarch.code_sync import scan as scanning
from torchx_monarch.code_sync.manifest import EXECUTABLE, FILE, FOLDER, LINK
from torchx_monarch.code_sync.scan import ScanError, scan


def paths(root: Path) -> set[str]:
    return set(scan(str(root)).entries)


def test_takes_all_kinds_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = os.fsdecode(b"caf\xe9 \n.py")
    write(tmp_path, {"a b.py": "1", "sub/deep/c.py": "2", odd: "3"})
    (tmp_path / "run.sh").touch(mode=0o755)
    (tmp_path / "empty" / "er").mkdir(parents=True)
    (tmp_path / "link").symlink_to("sub/../elsewhere")
    (tmp_path / "to folder").symlink_to("sub")
    with socket.socket(socket.AF_UNIX) as unix:
        monkeypatch.chdir(tmp_path)  # a socket's path must be short
        unix.bind("socket")
        tree = scan(str(tmp_path))
    os.unlink("socket")
    kinds = {path: entry.kind for path, entry in tree.entries.items()}
    assert kinds == {
        "a b.py": FILE,
        "sub/deep/c.py": FILE,
        odd: FILE,
        "run.sh": EXECUTABLE,
        "empty/er": FOLDER,
        "link": LINK,
        "to folder": LINK,
    }
    assert tree.entries["link"].content == "sub/../elsewhere"


def test_what_is_ignored_as_git_does(tmp_path: Path) -> None:
    """git itself is asked; a workspace that is a folder within the repository is among it."""
    write(
        tmp_path / "repo",
        {
            ".gitignore": "*.pt\n/ws/data/\n!keep.pt\nbuild\n",
            "ws/.gitignore": "logs/*\n!logs/kept.txt\n",
            "ws/train.py": "",
            "ws/model.pt": "",
            "ws/keep.pt": "",
            "ws/data/big.bin": "",
            "ws/build/out.o": "",
            "ws/logs/a.txt": "",
            "ws/logs/kept.txt": "",
            "ws/sub/.gitignore": "!*.pt\n*.tmp\n",
            "ws/sub/model.pt": "",
            "ws/sub/x.tmp": "",
            "ws/sub/build/y": "",
            "ws/x.tmp": "",
            "ws/mod/__init__.py": "",
        },
    )
    git = ["git", "-C", str(tmp_path / "repo")]
    subprocess.run([*git, "init", "-q"], check=True, timeout=WITHIN)
    for workspace in ("ws", "."):
        listed = subprocess.run(
            [*git, "-C", workspace, "ls-files", "-z", "--cached", "--others", "--exclude-per-directory=.gitignore"],
            capture_output=True,
            text=True,
            check=True,
            timeout=WITHIN,
        ).stdout
        assert paths((tmp_path / "repo" / workspace).resolve()) == set(listed.split("\0")) - {""}
    assert "big.bin" in paths(tmp_path / "repo/ws/data"), "a workspace that git ignores was asked for by name"


def test_torchxignore_comes_first(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            ".torchxignore": "*.ckpt  # TorchX has comments here\n!important.pt\ndocs/*\n",
            ".gitignore": "*.pt\n",
            ".git/HEAD": "",
            "a.ckpt": "",
            "a.pt": "",
            "important.pt": "",
            "docs/deep/page.md": "",
            "a.py": "",
            "__pycache__/a.cpython-311.pyc": "",
            ".torchx-monarch-0123": "of another client, for a moment",
        },
    )
    assert paths(tmp_path) == {".torchxignore", ".gitignore", "important.pt", "a.py", "docs"}


_NAMES = st.sampled_from(["a", "b", "a.py", "b.py"])
_PATTERNS = st.sampled_from(["a", "*", "*.py", "a/*", "*/b", "a/b", "?", "[ab].py", "./a", "a/"])


@settings(max_examples=60, deadline=None)
@given(
    files=st.lists(st.lists(_NAMES, min_size=1, max_size=3).map("/".join), min_size=1, max_size=8),
    lines=st.lists(st.builds(lambda no, pattern: no + pattern, st.sampled_from(["", "!"]), _PATTERNS), max_size=5),
)
def test_torchxignore_means_what_it_means_to_torchx(
    tmp_path_factory: pytest.TempPathFactory, files: list[str], lines: list[str]
) -> None:
    from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
    from torchx.workspace.api import walk_workspace

    root = tmp_path_factory.mktemp("ws")
    for path in files:
        where = root / path
        if not where.exists() and not any(parent.is_file() for parent in where.parents):
            write(root, {path: ""})
    write(root, {".torchxignore": "\n".join(lines)})
    theirs = {
        os.path.relpath(os.path.join(folder, name), root)
        for folder, _, files in walk_workspace(LocalFileSystem(), str(root))
        for name in files
    }
    taken = scan(str(root)).entries
    assert {path for path, entry in taken.items() if entry.kind == FILE} == theirs


def test_files_that_come_and_go_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"a.py": "1", "gone/b": "", "b": ""})
    walk = scanning._walk

    def remove(root: str) -> Iterator[Any]:
        for found in walk(root):
            shutil.rmtree(tmp_path / "gone", ignore_errors=True)
            (tmp_path / "b").unlink(missing_ok=True)
            yield found

    monkeypatch.setattr(scanning, "_walk", remove)
    assert paths(tmp_path) == {"a.py"}


def test_says_what_is_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"a.py": "1" * 100, "data/train.bin": "1" * 1000})
    monkeypatch.setattr(scanning, "_MAX_FILE_BYTES", 500)
    with pytest.raises(
        ScanError, match=r"data/train.bin has 1000 bytes, .* at most 500 bytes: name what .* in .torchxignore"
    ):
        scan(str(tmp_path))
    monkeypatch.setattr(scanning, "_MAX_FILE_BYTES", 1000)
    monkeypatch.setattr(scanning, "_MAX_TOTAL_BYTES", 1050)
    with pytest.raises(ScanError, match="have 1100 bytes, and code at most 1050 bytes"):
        scan(str(tmp_path))
    monkeypatch.setattr(scanning, "MAX_ENTRIES", 1)
    with pytest.raises(ScanError, match="more than 1 files: name a smaller one"):
        scan(str(tmp_path))
    with pytest.raises(ScanError, match="is no folder"):
        scan(str(tmp_path / "nosuch"))
