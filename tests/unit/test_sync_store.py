# SPDX-License-Identifier: BSD-3-Clause
"""What hosts keep of a workspace and hand out: whole, exact, and whatever runs do to it."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import hashlib
import json
import os
import shutil
import socket
import stat
import subprocess
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import pytest

from tests.local.test_detached_disk import mount
from tests.waits import WITHIN
from torchx_monarch.code_sync import code_store as store_module
from torchx_monarch.code_sync.code_store import CodeStore
from torchx_monarch.code_sync.manifest import Entry, Tree
from torchx_monarch.code_sync.scan import scan
from torchx_monarch.code_sync.upload import ChangedError, Upload, UploadError, pack
from torchx_monarch.controller.host_messages import CheckpointPart, PartSource
from torchx_monarch.controller.host_network import HostNetwork, Peer
from torchx_monarch.host.checkpoint_files import PartExchange, PartGoneError
from torchx_monarch.host.code_distribution import HostCode
from torchx_monarch.model.world import LaunchError
from torchx_monarch.transport import credentials, messages
from torchx_monarch.transport.address import Address
from torchx_monarch.transport.connections import Identity
from torchx_monarch.transport.messages import Message


def tree_of(root: Path) -> Tree:
    return scan(str(root))


def packed(root: Path, tree: Tree, store: CodeStore) -> bytes:
    stored = set(store.digests())
    with tempfile.TemporaryFile() as file:
        pack(str(root), tree, [digest for digest in tree.contents if digest[:16] not in stored], file)
        return file.read()


def received(store: CodeStore, data: bytes) -> Upload:
    upload = store.new_upload(str(time.time_ns()), len(data))
    upload.append(data)
    return upload


def send(root: Path, store: CodeStore) -> Tree:
    """What client and host do, without anything in between."""
    tree = tree_of(root)
    if not store.has(tree.hash):
        store.add(tree.hash, [received(store, packed(root, tree, store))])
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
    with pytest.raises(OSError, match=f"{folder} is a symbolic link"):
        checkout(store, tree)
    assert [path.name for path in outside.iterdir()] == ["m.py"]


def _open_files(folder: Path) -> int:
    """The files of a folder that this process has open. Garbage of other tests may close others at any time."""
    with os.scandir("/proc/self/fd") as entries:
        return sum(os.path.realpath(entry.path).startswith(f"{folder}/") for entry in entries)


def test_old_trees_go(tmp_path: Path, store: CodeStore) -> None:
    root = write(tmp_path / "ws", {"a.py": "1"})
    first = send(root, store)
    count = _open_files(tmp_path)
    for number in range(store_module._TREES):
        write(root, {"a.py": f"new {number}"})
        checkout(store, send(root, store))
    assert not store.has(first.hash)
    with pytest.raises(UploadError, match="must be sent again"):
        checkout(store, first)
    assert count and _open_files(tmp_path) == count + 2 * (store_module._TREES - 1)


def test_contents_are_sent_once_and_do_not_stay_in_ever_more_files(tmp_path: Path, store: CodeStore) -> None:
    root = write(tmp_path / "ws", {"big.py": os.urandom(10_000).hex()})
    sizes = []
    for number in range(store_module._UPLOADS + 10):
        write(root, {f"{number}.py": str(number)})
        tree = tree_of(root)
        data = packed(root, tree, store)
        sizes.append(len(data) > 10_000)
        store.add(tree.hash, [received(store, data)])
    assert sizes.count(True) == 2 and sizes[0], "the first upload was sent again"
    assert len(store.find(tree.hash)) <= store_module._UPLOADS + 1
    assert tree_of(checkout(store, tree)) == tree


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
    mount(tmp_path / "disk", "size=2m")
    try:
        store = CodeStore(str(tmp_path / "disk" / "store"))
        tree = send(write(tmp_path / "ws", {"a.py": "1"}), store)
        folders = [checkout(store, tree, name) for name in ("one", "two", "three")]
        for folder in folders:
            write(folder, {"result": "x" * 500_000})
        assert checkout(store, tree, "one") == folders[0]
        large = send(write(tmp_path / "large", {"b.py": os.urandom(150_000).hex()}), store)
        assert [folder.exists() for folder in folders] == [True, False, True]
        assert tree_of(checkout(store, large, "three")).entries.keys() == {"b.py", "result"}
        too_large = write(tmp_path / "large", {"c.py": os.urandom(300_000).hex()})
        with pytest.raises(OSError, match=r"no space left: \d+ bytes, and the code needs 1500000"):
            send(too_large, store)
        assert [folder.exists() for folder in folders] == [False, False, True], "a run may use the last one"
    finally:
        subprocess.run(["umount", "--lazy", tmp_path / "disk"], check=True, timeout=WITHIN)


class Hosts:
    """Ten hosts, the first of which is replica 0; ``served`` counts those to which each has sent a tree."""

    def __init__(self, folder: Path, network: HostNetwork) -> None:
        self.served = Counter[int]()
        self.serving = set[asyncio.Task[None]]()
        self.networks = [dataclasses.replace(network, folder=str(folder / f"host{number}")) for number in range(10)]
        for own in self.networks:
            os.mkdir(own.folder)
            own.connect = self.connect  # type: ignore[method-assign]
        self.codes = [HostCode(os.path.join(own.folder, "code"), own) for own in self.networks]
        for number, code in enumerate(self.codes):
            self.replace(number, code.serve_host)

    def replace(self, number: int, serve: Callable[[Peer], Awaitable[None]]) -> None:
        """Have a host serve others in another way."""

        async def counted(peer: Peer) -> None:
            self.served[number] += 1
            await serve(peer)

        self.codes[number].serve_host = counted  # type: ignore[method-assign]
        self.networks[number].handlers["code"] = counted

    async def connect(self, greeting: Message) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        near, far = socket.socketpair()
        served = Peer({**greeting}, *await asyncio.open_connection(sock=far))
        serving = asyncio.ensure_future(self.codes[0].distribute(served))
        self.serving.add(serving)
        serving.add_done_callback(lambda done: served.writer.close())
        return await asyncio.open_connection(sock=near)

    def close(self) -> None:
        for network in self.networks:
            network.close()

    async def checkout(self, tree: Tree, numbers: Iterable[int]) -> None:
        folders = await asyncio.gather(*(self.codes[number].checkout(tree.hash, "ws") for number in numbers))
        assert all(tree_of(Path(folder)) == tree for folder in folders)


@pytest.fixture(params=["unix", "tls"])
def network(request: pytest.FixtureRequest, tmp_path: Path) -> HostNetwork:
    if request.param == "unix":
        return HostNetwork(Address("unix", path=str(tmp_path / "r.sock")))
    identity = Identity.from_credentials(credentials.create()[0], {"127.0.0.1"}, str(tmp_path))
    return HostNetwork(Address("tls", "127.0.0.1", 1), bind="127.0.0.1", identity=identity)


def test_hosts_pass_on_what_others_lack_as_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: HostNetwork
) -> None:
    root = write(tmp_path / "ws", {"a.py": os.urandom(1_000_000).hex(), "b.py": "1"})

    async def main() -> None:
        hosts = Hosts(tmp_path, network)
        for text in ("1", "2"):
            tree = send(write(root, {"b.py": text}), hosts.codes[0]._store)
            with monkeypatch.context() as patched:
                patched.setattr(zlib, "compressobj", None)  # nothing is compressed again
                await hosts.checkout(tree, range(1, 10))
            assert hosts.served.total() == 9 and hosts.served[0] < 6, hosts.served
            hosts.served.clear()
        large, small = (upload.size for upload in hosts.codes[9]._store.uploads())
        assert large > 1_000_000 and small < 1000
        with pytest.raises(LaunchError, match="the code 0000 is not on this host .any more.: it must be sent again"):
            await hosts.codes[1].checkout("0000", "ws")
        hosts.close()

    asyncio.run(asyncio.wait_for(main(), WITHIN))


def test_a_host_passes_on_checkpoints_at_the_port_of_the_code(tmp_path: Path, network: HostNetwork) -> None:
    async def main() -> None:
        hosts = Hosts(tmp_path, network)
        tree = send(write(tmp_path / "ws", {"b.py": "1"}), hosts.codes[0]._store)
        await hosts.checkout(tree, [1, 2])
        ours, theirs = (PartExchange(own, lambda key: None) for own in hosts.networks[1:3])
        part = CheckpointPart(1, 0, 2, (0,), (), 1, 0, "", 0.0, False)
        with pytest.raises(PartGoneError):
            await ours.fetch(PartSource(part, (hosts.networks[2].listen(),)), str(tmp_path), gently=False)
        assert hosts.networks[2].handlers.keys() == {"code", "checkpoint"} and theirs is not ours
        hosts.close()

    asyncio.run(asyncio.wait_for(main(), WITHIN))


async def cut(peer: Peer) -> None:
    """Announce an upload, send a part of it, and disconnect."""
    await peer.send({"type": "uploads", "uploads": [("1", 1000)]})
    await messages.send_bytes(peer.writer, bytes(500))


async def send_another(peer: Peer) -> None:
    """Send the upload of another tree."""
    data = upload_of(FILE, [ONE], b"1")
    await peer.send({"type": "uploads", "uploads": [("1", len(data))]})
    await messages.send_bytes(peer.writer, data)


@pytest.mark.parametrize("serve", [cut, send_another])
def test_hosts_whose_source_fails_get_the_code_from_replica_0(
    tmp_path: Path, network: HostNetwork, serve: Callable[[Peer], Awaitable[None]]
) -> None:
    async def main() -> None:
        hosts = Hosts(tmp_path, network)
        tree = send(write(tmp_path / "ws", {"b.py": "1"}), hosts.codes[0]._store)
        await hosts.checkout(tree, range(1, 4))
        for number in range(1, 4):
            hosts.replace(number, serve)
        hosts.served.clear()
        await hosts.checkout(tree, range(4, 10))
        assert 0 < sum(hosts.served[number] for number in range(1, 4)) <= 6, hosts.served  # two for each, and no more
        assert hosts.served[0] > 0
        hosts.close()

    asyncio.run(asyncio.wait_for(main(), WITHIN))


def upload_of(entries: object, contents: object = (), data: bytes = b"") -> bytes:
    text = json.dumps({"tree": entries, "contents": contents}).encode()
    return gzip.compress(text + b"\n" + data, mtime=0)  # each process collects the same tests


ONE = hashlib.sha256(b"1").hexdigest()
FILE = {"a.py": ["f", ONE, 1]}


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"nonsense", "cannot be unpacked: Not a gzipped file"),
        (upload_of(FILE, [ONE], b"1")[:-3], "cannot be unpacked"),
        (gzip.compress(b"[" * 100_000, mtime=0), "cannot be unpacked"),
        (gzip.compress(b"{}", mtime=0), "cannot be unpacked: 'tree'"),
        (upload_of(FILE, [ONE], b"2"), "has another digest"),
        (upload_of(FILE, [ONE], b"11"), "more contents arrived than were announced"),
        (upload_of(FILE, ["0" * 64]), "cannot be unpacked: '0000"),
        (upload_of(FILE), "not arrived as a whole"),
        (upload_of({}), "not arrived as a whole"),
        (upload_of({"../a": ["d", "", 0]}), "cannot be unpacked: '../a' is no path below a workspace"),
    ],
)
def test_an_upload_that_is_torn_or_wrong_changes_nothing(
    data: bytes, why: str, tmp_path: Path, store: CodeStore
) -> None:
    tree = Tree.decode(FILE)
    with pytest.raises(UploadError, match=why):
        store.add(tree.hash, [received(store, data)])
    assert not store.has(tree.hash) and not os.listdir(tmp_path / "store")
    store.add(tree.hash, [received(store, upload_of(FILE, [ONE], b"1"))])
    assert tree_of(checkout(store, tree)) == tree


def test_a_file_that_changes_while_it_is_packed(tmp_path: Path, store: CodeStore) -> None:
    root = write(tmp_path / "ws", {"a.py": "1"})
    tree = tree_of(root)
    for change in (lambda: write(root, {"a.py": "3"}), (root / "a.py").unlink, (root / "a.py").mkdir):
        change()
        with pytest.raises(ChangedError, match="a.py"):
            packed(root, tree, store)


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
    with pytest.raises(ValueError, match=why):
        Tree.decode(entries)


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
