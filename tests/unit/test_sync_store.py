# SPDX-License-Identifier: BSD-3-Clause
"""What hosts keep of a workspace and hand out: whole, exact, and whatever runs do to it."""

from __future__ import annotations

import os
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.local.test_detached_disk import mount, unmount
from torchx_monarch.code_sync import code_store as store_module
from torchx_monarch.code_sync.code_store import CodeStore, StoreError
from torchx_monarch.code_sync.manifest import ChangedError, Entry, PackError, Tree, TreeError, pack
from torchx_monarch.code_sync.scan import scan


def tree_of(root: Path) -> Tree:
    return scan(str(root))


def pieces(root: Path, tree: Tree, digests: list[str]) -> Iterator[bytes]:
    return pack(tree.files(str(root), digests))


def send(root: Path, store: CodeStore) -> Tree:
    """What client and host do, without anything in between."""
    tree = tree_of(root)
    if store.find_tree(tree.hash) is None:
        assert Tree.decode(tree.encode()) == tree
        for piece in pieces(root, tree, store.expect(tree)):
            store.take(piece)
        store.complete()
    return tree


def write(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


@pytest.fixture
def store(tmp_path: Path) -> CodeStore:
    return CodeStore(str(tmp_path / "store"))


def checkout(store: CodeStore, tree: Tree, workspace: str = "") -> Path:
    folder, unused = store.checkout(tree.hash, workspace)
    shutil.rmtree(unused)
    return Path(folder)


def test_a_run_has_new_code_and_finds_the_results_of_those_before(tmp_path: Path, store: CodeStore) -> None:
    outside = write(tmp_path / "outside", {"m.py": "precious"})
    root = write(
        tmp_path / "ws", {"train.py": "1", "old/gone.py": "", "pkg/m.py": "1", "a \n'\udce9": "1", "b.py": "1"}
    )
    (root / "empty").mkdir()
    folder = checkout(store, send(root, store))
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    results = {"ckpt/step1.pt": "weights", "out.txt": "y", "empty/out.txt": "z"}
    code = {
        "train.py": "changed",
        "__pycache__/train.pyc": "",
        "old/out.txt": "",
        "made": "a name of the next workspace",
    }
    write(folder, {**results, **code})
    shutil.rmtree(folder / "pkg")
    (folder / "pkg").symlink_to(outside)
    (folder / "a \n'\udce9").unlink()
    (folder / "a \n'\udce9").mkdir()
    (folder / "b.py").unlink()

    shutil.rmtree(root / "old")
    write(root, {"pkg/new/m.py": ""})
    (root / "made").symlink_to("train.py")
    tree = send(root, store)
    assert checkout(store, tree) == folder
    write(root, results)
    assert tree_of(folder) == tree_of(root) and not (folder / "__pycache__").exists()
    assert (outside / "m.py").read_text() == "precious"

    shutil.rmtree(folder)
    assert tree_of(checkout(store, tree)) == tree
    shutil.rmtree(folder)
    folder.symlink_to(outside)
    with pytest.raises(StoreError, match=f"is a symbolic link: {folder}"):
        checkout(store, tree)
    assert [path.name for path in outside.iterdir()] == ["m.py"]


def test_old_trees_go(tmp_path: Path, store: CodeStore) -> None:
    root = write(tmp_path / "ws", {"a.py": "1"})
    first = send(root, store)
    for number in range(store_module._TREES):
        write(root, {"a.py": f"new {number}"})
        checkout(store, send(root, store))
    assert store.find_tree(first.hash) is None
    with pytest.raises(StoreError, match="must be sent again"):
        checkout(store, first)
    kept = [name for name in os.listdir(tmp_path / "store") if len(name) == 64]
    assert len(kept) == store_module._TREES


def test_the_least_recently_used_workspaces_go(tmp_path: Path, store: CodeStore) -> None:
    root = write(tmp_path / "ws", {"a.py": "1"})
    tree = send(root, store)
    first = checkout(store, tree, "0")
    for number in range(1, store_module._WORKSPACES + 3):
        folder = checkout(store, tree, str(number))
        assert tree_of(folder) == tree, "a run finds no files of another workspace's runs"
        write(folder, {"checkpoint": ""})
        assert checkout(store, tree, "0") == first
        write(first, {"checkpoint": "of the first"})
    assert len(list((tmp_path / "store").glob("*/a.py"))) == store_module._WORKSPACES
    assert tree_of(checkout(store, tree, "1")) == tree, "its results have gone"
    assert (first / "checkpoint").read_text() == "of the first"


def test_workspaces_go_when_space_is_short(tmp_path: Path) -> None:
    mount(tmp_path / "disk", "size=1m")
    try:
        store = CodeStore(str(tmp_path / "disk" / "store"))
        tree = send(write(tmp_path / "ws", {"a.py": "1"}), store)
        folders = [checkout(store, tree, name) for name in ("one", "two", "three")]
        for folder in folders:
            write(folder, {"result": "x" * 200_000})
        assert checkout(store, tree, "one") == folders[0]
        large = send(write(tmp_path / "large", {"b.py": os.urandom(150_000).hex()}), store)
        assert [folder.exists() for folder in folders] == [True, False, True]
        assert tree_of(checkout(store, large, "three")).entries.keys() == {"b.py", "result"}
        too_large = tree_of(write(tmp_path / "large", {"c.py": os.urandom(300_000).hex()}))
        with pytest.raises(StoreError, match=r"no space left: \d+ bytes, and the code needs 1500000"):
            store.expect(too_large)
        assert [folder.exists() for folder in folders] == [False, False, True], "a run may use the last one"
    finally:
        unmount(tmp_path / "disk")


def test_what_is_torn_changes_nothing(tmp_path: Path, store: CodeStore) -> None:
    root = write(tmp_path / "ws", {"a.py": "1", "big.bin": os.urandom(3_000_000).hex()})
    tree = tree_of(root)
    sent = list(pieces(root, tree, store.expect(tree)))
    assert len(sent) > 2
    for piece in sent[:2]:
        store.take(piece)
    with pytest.raises(StoreError, match="not complete"):
        store.complete()
    store.cancel_transfer()
    assert store.find_tree(tree.hash) is None and not list((tmp_path / "store").glob("*.part"))
    send(root, store)
    assert tree_of(checkout(store, tree)) == tree


def test_a_run_that_begins_leaves_the_contents_of_a_transfer(tmp_path: Path, store: CodeStore) -> None:
    first = send(write(tmp_path / "first", {"a.py": "1"}), store)
    root = write(
        tmp_path / "second", {"a.py": "1", "b.py": os.urandom(300_000).hex(), "c.py": os.urandom(300_000).hex()}
    )
    tree = tree_of(root)
    *sent, last = pieces(root, tree, store.expect(tree))
    for piece in sent:
        store.take(piece)
    checkout(store, first)
    store.take(last)
    store.complete()
    assert tree_of(checkout(store, tree)) == tree


def test_what_is_not_what_it_says_is_refused(tmp_path: Path, store: CodeStore) -> None:
    root = write(tmp_path / "ws", {"a.py": "1"})
    other = write(tmp_path / "other", {"a.py": "2"})
    tree, theirs = tree_of(root), tree_of(other)
    store.expect(tree)
    with pytest.raises(PackError, match="another digest"):
        store.take(b"".join(pieces(other, theirs, list(theirs.contents))))
    store.expect(tree)
    with pytest.raises(PackError, match="unpacked"):
        store.take(b"nonsense")
    with pytest.raises(ChangedError, match="a.py"):
        write(root, {"a.py": "3"})
        list(pieces(root, tree, list(tree.contents)))
    store.cancel_transfer()
    assert not list((tmp_path / "store").iterdir())
    store.expect(tree)
    with pytest.raises(PackError, match="more contents arrived"):
        store.take(zlib.compress(b"11"))


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ({"../a": ["d", "", 0]}, "no path below"),
        ({"/etc/x": ["d", "", 0]}, "no path below"),
        ({"a//b": ["d", "", 0]}, "no path below"),
        ({"a\0b": ["d", "", 0]}, "no path below"),
        ({"a": ["l", "/etc", 0], "a/passwd": ["d", "", 0]}, "lies below 'a'"),
        ({"a": ["f", "0" * 63, 1]}, "no file, link or folder"),
        ({"a": ["f", "../../x", 1]}, "no file, link or folder"),
        ({"a": ["f", "0" * 64, 1], "b": ["f", "0" * 64, 2]}, "another size"),
        ({"a": ["l", "", 0]}, "no file, link or folder"),
        ({"a": ["d", "x", 0]}, "no file, link or folder"),
        ({"a": ["p", "", 0]}, "no file, link or folder"),
        ({"a": 1}, "not a tree"),
        ([], "not a tree"),
    ],
)
def test_a_tree_that_reaches_out_is_refused(entries: object, why: str) -> None:
    import json

    with pytest.raises(TreeError, match=why):
        Tree.decode(zlib.compress(json.dumps(entries).encode()))
    with pytest.raises(TreeError):
        Tree.decode(b"nonsense")
    with pytest.raises(TreeError, match="cut off"):
        Tree.decode(zlib.compress(b"{}" * 1000)[:-3])


def test_different_trees_have_different_hashes() -> None:
    digest = "0" * 64
    trees = [
        Tree({}),
        Tree({"a": Entry("f", digest, 1)}),
        Tree({"a": Entry("x", digest, 1)}),
        Tree({"b": Entry("f", digest, 1)}),
        Tree({"a": Entry("l", digest, 0)}),
        Tree({"a": Entry("d", "", 0)}),
        Tree({"a": Entry("d", "", 0), "b": Entry("d", "", 0)}),
    ]
    assert len({tree.hash for tree in trees}) == len(trees)
    assert Tree(dict(reversed([*trees[-1].entries.items()]))).hash == trees[-1].hash


def test_says_that_there_is_no_room(tmp_path: Path, store: CodeStore) -> None:
    with pytest.raises(StoreError, match="no space left: .* bytes, and the code needs 20000000"):
        store.expect(Tree({"a": Entry("f", "0" * 64, 10**16)}))
    Path(tmp_path / "store").rmdir()
    Path(tmp_path / "store").write_text("in the way")
    with pytest.raises(StoreError, match="cannot make the code on this host: File exists"):
        store.expect(Tree({}))


def _make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "x").touch()


def _link_to_zeros(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("change", [_make_fifo, _make_folder, _link_to_zeros, _shorten, Path.unlink])
@pytest.mark.parametrize("size", [1, 3 << 20])
def test_code_that_a_run_has_changed_in_the_store_is_refused(
    change: Callable[[Path], None], size: int, tmp_path: Path, store: CodeStore
) -> None:
    root = write(tmp_path / "ws", {"a.py": "x" * size, "b.py": "y"})
    digest = tree_of(root).entries["a.py"].content
    stored = tmp_path / "store" / digest
    stored.parent.mkdir()
    os.mkfifo(f"{stored}.part")
    tree = send(root, store)
    change(stored)
    with pytest.raises(StoreError, match=f"cannot make the code on this host: .*: {stored}"):
        checkout(store, tree)
    with pytest.raises(StoreError, match=f"a program has changed the code on this host: {stored}"):
        list(store.pieces(tree, [digest]))
