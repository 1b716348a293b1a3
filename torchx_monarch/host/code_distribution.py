# SPDX-License-Identifier: BSD-3-Clause
"""Bring code to the hosts of a live allocation: a client sends it to replica 0, from which the other hosts get it.

After a ``sync`` handshake the client sends requests, one JSON line each; replica 0 answers each with one JSON line.

=========  =============================================================================================================
``probe``  whether every host sees the file ``path`` with the text ``text``: the answer is ``shared``
``tree``   the hash ``tree`` of a workspace: the answer is ``have``, whether replica 0 has it. If not, the client sends
           it (below). Replica 0 has every host get what it lacks, while it receives the tree itself; the answer is
           ``done``
=========  =============================================================================================================

A host that lacks a tree opens a connection of its own to replica 0, with the greeting ``code`` and the same field
``tree``, so that a slow one delays neither requests nor the other hosts; replica 0 sends it the tree, and contents as
it has them itself.

A tree is sent in frames (``Tree.encode``). The receiver answers ``missing``, a hexadecimal number: bit N is set if it
lacks entry N of ``Tree.contents``. These contents follow in frames (``pack``). A frame is a length (4 bytes,
big-endian) and as many bytes, at most ``FRAME``; an empty frame is the last. The length ``_FAILED`` and a JSON line
with a ``reason`` may take the place of a frame from replica 0, and ``failed`` with a ``reason`` that of any of its
answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from torchx_monarch.code_sync.code_store import CodeStore, StoreError
from torchx_monarch.code_sync.manifest import MAX_TREE, PackError, Tree, TreeError
from torchx_monarch.controller.host_messages import FetchCode, ProbeFile
from torchx_monarch.controller.rendezvous import Peer
from torchx_monarch.controller.run_queue import RunQueue
from torchx_monarch.model.world import LaunchError
from torchx_monarch.system import run_dirs, safe_files
from torchx_monarch.transport import messages
from torchx_monarch.transport.connections import ConnectError

FRAME = 1 << 19
"""Most bytes in a frame."""

_FAILED = 0xFFFFFFFF

_END = bytes(4)
"""The empty frame."""

_ARRIVAL_INTERVAL = 0.1
"""Seconds between two looks whether replica 0 has more contents for another host."""

_SILENCE = 60.0
"""Seconds that the other side may be silent during a transfer; it may be reading a large file from a slow disk."""

Connect = Callable[[messages.Message], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class HostCode:
    """The code on one host: receive it, send it to other hosts, and check it out for runs.

    Its methods raise ``LaunchError`` if another side breaks off, is silent or sends something else, or this host cannot
    store or check out the code.

    Args:
        folder: path of the code store, which is created.
    """

    def __init__(self, folder: str, host: str) -> None:
        self._store = CodeStore(folder)
        self._host = host
        self._receiving = asyncio.Lock()

    async def checkout(self, tree_hash: str, workspace: str) -> str:
        """Check out a tree for the next run, which is of the given workspace; return the folder that it works in."""
        folder: str
        folder, unused = await _in_thread(self._store.checkout, tree_hash, workspace)
        asyncio.get_running_loop().run_in_executor(None, run_dirs.remove_tree, unused)
        return folder

    def has(self, tree_hash: str) -> bool:
        return self._store.find_tree(tree_hash) is not None

    async def fetch(self, tree_hash: str, connect: Connect) -> None:
        """Get a tree from replica 0, unless it is on this host, or is just received."""
        async with self._receiving:
            if self.has(tree_hash):
                return
            try:
                reader, writer = await connect({"type": "code", "tree": tree_hash})
            except ConnectError as error:
                raise LaunchError(f"the code {tree_hash:.12} is not on this host: {error}") from None
            with contextlib.closing(writer):
                await self._receive_tree(tree_hash, reader, writer)
                # Replica 0 itself may wait for a large file. If its machine is lost, the kernel breaks the connection.
                await self._receive_contents(reader, None)

    async def _receive_tree(self, tree_hash: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        text = bytearray()
        await _receive_frames(reader, lambda frame: text.extend(frame[: MAX_TREE + 1 - len(text)]))
        missing = await _in_thread(self._expect, bytes(text), tree_hash)
        await messages.send(writer, {"type": "missing", "missing": missing})

    async def _receive_contents(self, reader: asyncio.StreamReader, silence: float | None) -> None:
        await _receive_frames(reader, self._store.take, silence)
        await _in_thread(self._store.complete)

    async def serve_host(self, peer: Peer) -> None:
        """Send a tree to another host, after its greeting ``code``, and contents as soon as they are on this one."""
        try:
            tree = self._store.sendable(str(peer.greeting.get("tree")))
            encoded = await asyncio.to_thread(tree.encode)
            await _send(peer.writer, (encoded[at : at + FRAME] for at in range(0, len(encoded), FRAME)))
            await messages.send_bytes(peer.writer, _END)
            answer = await peer.receive(_SILENCE)
            bits = int(str((answer or {}).get("missing")), 16)
            missing = [digest for number, digest in enumerate(tree.contents) if bits >> number & 1]
            while missing:
                while not self._store.holds(missing[0]) and self._receiving.locked():
                    await asyncio.sleep(_ARRIVAL_INTERVAL)
                # They arrive in this order, too. Without the first, the transfer has failed, and so does this one.
                present = list(itertools.takewhile(self._store.holds, missing)) or missing
                await _send(peer.writer, self._store.pieces(tree, present))
                del missing[: len(present)]
            await messages.send_bytes(peer.writer, _END)
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
            raise LaunchError(f"a request is probe or tree, not {message.get('type')!r:.40}")
        tree_hash = str(message["tree"])
        if self.has(tree_hash):
            await run_queue.hosts.broadcast(FetchCode(tree_hash))
            return {"type": "have", "have": True}
        await peer.send({"type": "have", "have": False})
        try:
            async with self._receiving:
                await self._receive_tree(tree_hash, peer.reader, peer.writer)
                fetching = asyncio.ensure_future(run_queue.hosts.broadcast(FetchCode(tree_hash)))
                fetching.add_done_callback(lambda done: done.cancelled() or done.exception())
                await self._receive_contents(peer.reader, _SILENCE)
        except LaunchError as error:
            raise LaunchError(f"{self._host}: {error}") from None
        await fetching
        return {"type": "done"}

    def _expect(self, text: bytes, tree_hash: str) -> str:
        if len(text) > MAX_TREE:
            raise LaunchError(f"a tree of more than {MAX_TREE} bytes")
        tree = Tree.decode(text)
        if tree.hash != tree_hash:
            raise LaunchError(f"a tree of the hash {tree.hash} came as {tree_hash}")
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


async def _receive_frames(
    reader: asyncio.StreamReader, take: Callable[[bytes], object], silence: float | None = _SILENCE
) -> None:
    """Take the frames up to the empty one, in a thread; after a failure read on, as the sender reads only then."""
    failure: LaunchError | None = None
    try:
        while size := int.from_bytes(await asyncio.wait_for(reader.readexactly(4), silence), "big"):
            if size == _FAILED:
                raise LaunchError(str(((await messages.receive(reader, _SILENCE)) or {}).get("reason")))
            if size > FRAME:
                raise LaunchError(f"a frame of {size} bytes; at most {FRAME} are allowed")
            frame = await asyncio.wait_for(reader.readexactly(size), silence)
            if failure is None:
                try:
                    await _in_thread(take, frame)
                except LaunchError as error:
                    failure = error
    except asyncio.TimeoutError:
        raise LaunchError(f"the other side has sent nothing for {_SILENCE:g} s") from None
    except (asyncio.IncompleteReadError, OSError):
        raise LaunchError("the other side has disconnected") from None
    if failure is not None:
        raise failure


async def _send(writer: asyncio.StreamWriter, pieces: Iterator[bytes]) -> None:
    """Send pieces as frames. Each is produced in a thread, so as not to block the event loop."""
    while piece := await asyncio.to_thread(next, pieces, b""):
        if not await messages.send_bytes(writer, len(piece).to_bytes(4, "big") + piece):
            return


async def _in_thread(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return await asyncio.to_thread(function, *args)
    except (StoreError, PackError, TreeError) as error:
        raise LaunchError(str(error)) from None
