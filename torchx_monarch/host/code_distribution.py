# SPDX-License-Identifier: BSD-3-Clause
"""Bring code to the hosts of a live allocation: a client sends it to the leader, from which the other hosts get it.

After a ``sync`` handshake the client sends requests, one JSON line each; the leader answers each with one JSON line.

=========  =============================================================================================================
``probe``  whether every host sees the file ``path`` with the text ``text``: the answer is ``shared``
``tree``   the hash ``tree`` of a workspace, and ``base``, the hash of another: the answer is ``have`` and ``base``,
           whether the leader has the first and the second. If not the first, the client sends it (below). Then the
           leader has every host get what it lacks; the answer is ``done``
=========  =============================================================================================================

A host that lacks a tree opens a connection of its own to the leader, with the greeting ``code`` and the same fields
``tree`` and ``base``, so that a slow one delays neither requests nor the other hosts; the leader sends it the tree.

A tree is sent in frames (``Tree.encode``), as a difference from the base if the receiver has that. The receiver answers
``missing``, a hexadecimal number: bit N is set if it lacks entry N of ``Tree.contents``. These contents follow in
frames (``pack``). A frame is a length (4 bytes, big-endian) and as many bytes, at most ``FRAME``; an empty frame is the
last. The length ``_FAILED`` and a JSON line with a ``reason`` may take the place of a frame from the leader, and
``failed`` with a ``reason`` that of any of its answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from torchx_monarch.code_sync.code_store import CodeStore, StoreError
from torchx_monarch.code_sync.manifest import MAX_TREE, PackError, Tree, TreeError
from torchx_monarch.controller.host_messages import FetchCode, ProbeFile
from torchx_monarch.controller.rendezvous import Peer
from torchx_monarch.controller.run_queue import RunQueue
from torchx_monarch.model.world import LaunchError
from torchx_monarch.system import safe_files
from torchx_monarch.transport import messages
from torchx_monarch.transport.connections import ConnectError

FRAME = 1 << 19
"""Most bytes in a frame."""

_FAILED = 0xFFFFFFFF

_SILENCE = 60.0
"""Seconds that the other side may be silent during a transfer; it may be reading a large file from a slow disk."""

Connect = Callable[[messages.Message], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class SyncError(LaunchError):
    """Raised when code cannot be copied to the hosts; the message gives the reason."""


class HostCode:
    """The code on one host: receive it, send it to other hosts, and check it out for runs.

    Its methods raise ``SyncError`` if another side breaks off, is silent or sends something else, or this host cannot
    store or check out the code.

    Args:
        folder: path of the code store, which is created.
    """

    def __init__(self, folder: str, host: str) -> None:
        self._store = CodeStore(folder)
        self._host = host
        self._working = ""
        self._newest = ""
        self._receiving = asyncio.Lock()

    async def checkout(self, tree_hash: str, workspace: str) -> str:
        """Check out a tree for the next run, which is of the given workspace; return the folder that it works in."""
        self._working = await _in_thread(self._store.acquire, tree_hash, workspace)
        return self._working

    async def release(self) -> None:
        """Release the folder of the last run, if a run had one."""
        working, self._working = self._working, ""
        if working:
            await _in_thread(self._store.release, working)

    def has(self, tree_hash: str) -> bool:
        return self._store.find_tree(tree_hash) is not None

    async def fetch(self, tree_hash: str, connect: Connect) -> None:
        """Get a tree from the leader, unless it is on this host."""
        if self.has(tree_hash):
            return
        try:
            reader, writer = await connect({"type": "code", "tree": tree_hash, "base": self._newest})
        except ConnectError as error:
            raise SyncError(f"the code {tree_hash:.12} is not on this host: {error}") from None
        try:
            await self.receive(tree_hash, reader, writer)
        finally:
            writer.close()

    async def receive(self, tree_hash: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with self._receiving:
            text = bytearray()
            await _receive_frames(reader, lambda frame: text.extend(frame[: MAX_TREE + 1 - len(text)]))
            missing = await _in_thread(self._expect, bytes(text), tree_hash)
            await messages.send(writer, {"type": "missing", "missing": missing})
            await _receive_frames(reader, self._store.take)
            self._newest = await _in_thread(self._store.complete)

    async def serve_host(self, peer: Peer) -> None:
        """Send a tree to another host, after its greeting ``code``."""
        try:
            tree = self._store.tree(str(peer.greeting.get("tree")))
            encoded = await asyncio.to_thread(tree.encode, self._store.find_tree(str(peer.greeting.get("base"))))
            await _send(peer.writer, (encoded[at : at + FRAME] for at in range(0, len(encoded), FRAME)))
            answer = await peer.receive(_SILENCE)
            bits = int(str((answer or {}).get("missing")), 16)
            missing = [digest for number, digest in enumerate(tree.contents) if bits >> number & 1]
            await _send(peer.writer, self._store.pieces(tree, missing))
        except (StoreError, ValueError) as error:
            peer.writer.write(_FAILED.to_bytes(4, "big"))
            await peer.send({"type": "failed", "reason": str(error)[:8000]})

    async def serve_client(self, run_queue: RunQueue, peer: Peer) -> None:
        """Answer the requests of a client after a ``sync`` handshake, until it disconnects or a request fails."""
        run_queue.touch()
        while message := await peer.receive(_SILENCE):
            try:
                with run_queue.in_use():
                    answer = await self._answer(run_queue, message, peer)
            except Exception as error:
                answer = {"type": "failed", "reason": (str(error) or type(error).__name__)[:8000]}
            if not await peer.send(answer) or answer["type"] == "failed":
                return

    async def _answer(self, run_queue: RunQueue, message: messages.Message, peer: Peer) -> messages.Message:
        if message.get("type") == "probe":
            probed = await run_queue.hosts.broadcast(ProbeFile(str(message["path"]), str(message["text"])))
            return {"type": "shared", "shared": all(probed)}
        if message.get("type") != "tree":
            raise SyncError(f"a request is probe or tree, not {message.get('type')!r:.40}")
        tree_hash = str(message["tree"])
        if self.has(tree_hash):
            await run_queue.hosts.broadcast(FetchCode(tree_hash))
            return {"type": "have", "have": True, "base": False}
        await peer.send({"type": "have", "have": False, "base": self.has(str(message.get("base")))})
        try:
            await self.receive(tree_hash, peer.reader, peer.writer)
        except SyncError as error:
            raise SyncError(f"{self._host}: {error}") from None
        await run_queue.hosts.broadcast(FetchCode(tree_hash))
        return {"type": "done"}

    def _expect(self, text: bytes, tree_hash: str) -> str:
        if len(text) > MAX_TREE:
            raise SyncError(f"a tree of more than {MAX_TREE} bytes")
        tree = Tree.decode(text, self._store.find_tree)
        if tree.hash != tree_hash:
            raise SyncError(f"a tree of the hash {tree.hash} came as {tree_hash}")
        missing = set(self._store.expect(tree))
        return f"{sum(1 << number for number, digest in enumerate(tree.contents) if digest in missing):x}"


async def probe(path: str, text: str) -> bool:
    """Return whether this host sees a file with a text."""

    def sees_text() -> bool:
        try:
            with open(safe_files.open_file(path, any_owner=True), encoding="utf-8") as file:
                return file.read(1000) == text
        except (OSError, ValueError):
            return False

    return await asyncio.to_thread(sees_text)


async def _receive_frames(reader: asyncio.StreamReader, take: Callable[[bytes], object]) -> None:
    """Take the frames up to the empty one, in a thread; after a failure read on, as the sender reads only then."""
    failure: SyncError | None = None
    try:
        while size := int.from_bytes(await asyncio.wait_for(reader.readexactly(4), _SILENCE), "big"):
            if size == _FAILED:
                raise SyncError(str(((await messages.receive(reader, _SILENCE)) or {}).get("reason")))
            if size > FRAME:
                raise SyncError(f"a frame of {size} bytes; at most {FRAME} are allowed")
            frame = await asyncio.wait_for(reader.readexactly(size), _SILENCE)
            if failure is None:
                try:
                    await _in_thread(take, frame)
                except SyncError as error:
                    failure = error
    except asyncio.TimeoutError:
        raise SyncError(f"the other side has sent nothing for {_SILENCE:g} s") from None
    except (asyncio.IncompleteReadError, OSError):
        raise SyncError("the other side has disconnected") from None
    if failure is not None:
        raise failure


async def _send(writer: asyncio.StreamWriter, pieces: Iterator[bytes]) -> None:
    """Send pieces as frames, and the empty one. Each is produced in a thread, so as not to block the event loop."""
    while piece := await asyncio.to_thread(next, pieces, b""):
        if not await messages.send_bytes(writer, len(piece).to_bytes(4, "big") + piece):
            return
    await messages.send_bytes(writer, bytes(4))


async def _in_thread(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return await asyncio.to_thread(function, *args)
    except (StoreError, PackError, TreeError) as error:
        raise SyncError(str(error)) from None
