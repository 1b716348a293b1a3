# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Distribute code to the hosts of a live allocation: a client sends it to replica 0 once, replica 0 to every host.

After a ``sync`` handshake the client sends requests, one JSON line each; replica 0 answers each with one JSON line.

=========  =============================================================================================================
``probe``  whether every host sees the file ``path`` with the text ``text``: the answer is ``shared``
``tree``   the hash ``tree`` of a workspace, and ``base``, the hash of another: the answer is ``have`` and ``base``,
           whether every host has the first and the second. If not the first, the client sends the tree in frames
           (``Tree.encode``), as a difference from the base if every host has that. The answer is ``missing``, a
           hexadecimal number: bit N is set if a host lacks entry N of ``Tree.contents``. The client sends these
           contents in frames (``pack``); the answer is ``done``
=========  =============================================================================================================

A frame is a length (4 bytes, big-endian) and as many bytes, at most ``FRAME``; an empty frame is the last. ``failed``
with a ``reason`` may replace any answer. Replica 0 stores nothing: it sends each frame to all hosts in one call of
their agents, and the next when all hosts have taken it. A tree is available on a host only when it is complete.
"""

from __future__ import annotations

import asyncio
import base64
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from torchx_monarch.code_sync.archive import PackError
from torchx_monarch.code_sync.code_store import CodeStore, StoreError
from torchx_monarch.code_sync.manifest import MAX_TREE, Tree, TreeError
from torchx_monarch.controller.run_queue import RunQueue
from torchx_monarch.model.world import LaunchError
from torchx_monarch.system import safe_files
from torchx_monarch.transport import messages

FRAME = 1 << 19
"""Most bytes in a frame: 0.7 MB in base64. A message between agent and host has at most ``messages.MAX_MESSAGE``."""

_SILENCE = 60.0
"""Seconds that a client may be silent during a transfer; it may be reading a large file from a slow disk."""

_HOSTS_TIMEOUT = 120.0
"""Seconds within which all hosts must have taken a frame."""

Broadcast = Callable[[str, dict[str, Any]], Awaitable[dict[int, Any]]]


class SyncError(LaunchError):
    """Raised when code cannot be copied to the hosts; the message gives the reason."""


class HostCode:
    """Receive code on one host and check it out for runs.

    Args:
        folder: path of the code store, which is created.
    """

    def __init__(self, folder: str) -> None:
        self._store = CodeStore(folder)
        self._text = bytearray()
        self._working = ""
        # A transfer is given up as soon as one host has failed; another host may still be at work on its last frame
        # when the first frame of the next transfer arrives.
        self._taking = asyncio.Lock()

    async def checkout(self, tree_hash: str, workspace: str) -> str:
        """Check out a tree for the next run, which is of the given workspace.

        Returns:
            the path of the folder that the run works in.

        Raises:
            SyncError: the tree is not on this host or cannot be checked out.
        """
        self._working = await self._in_thread(self._store.acquire, tree_hash, workspace)
        return self._working

    async def release(self) -> None:
        """Release the folder of the last run, if a run had one."""
        working, self._working = self._working, ""
        if working:
            await self._in_thread(self._store.release, working)

    async def has(self, args: dict[str, Any]) -> list[bool]:
        """Return, for each hash in ``args["trees"]``, whether the tree is on this host."""
        return [self._store.known(tree_hash) is not None for tree_hash in args["trees"]]

    async def distribute_code(self, broadcast: Broadcast, tree_hash: str) -> None:
        """Send a tree from this host to all hosts if one lacks it, such as a replacement for a lost host.

        Raises:
            SyncError: the tree is not on this host, or a host could not take it.
        """
        if all(have for (have,) in (await broadcast("code-has", {"trees": [tree_hash]})).values()):
            return
        tree = await self._in_thread(self._store.tree, tree_hash)
        encoded = await self._in_thread(tree.encode)
        parts = (encoded[at : at + FRAME] for at in range(0, len(encoded), FRAME))
        missing = _missing(tree, await send_to_all(broadcast, tree_hash, _from(parts), "code-tree"))
        try:
            await send_to_all(broadcast, tree_hash, _from(self._store.pieces(tree, missing)), "code-contents")
        except StoreError as error:
            raise SyncError(str(error)) from None

    async def take_tree(self, args: dict[str, Any]) -> str | None:
        """Take a frame of an encoded tree.

        Args:
            args: ``tree``, the hash of the tree; ``data``, the frame in base64; ``first`` and ``last``, whether it is
                the first frame, and the last.

        Returns:
            after the last frame, the contents that this host lacks, as a hexadecimal number with a bit for each entry
            of ``Tree.contents``; None before.

        Raises:
            SyncError: the frames are not the tree that was announced, or the disk has no room for the contents.
        """
        async with self._taking:
            if args["first"]:
                self._text.clear()
            self._text += base64.b64decode(args["data"])
            if len(self._text) > MAX_TREE:
                raise SyncError(f"a tree of more than {MAX_TREE} bytes")
            if not args["last"]:
                return None
            missing: str = await self._in_thread(self._expect, args["tree"])
            return missing

    async def take_contents(self, args: dict[str, Any]) -> None:
        """Take a frame of packed contents; the last frame completes the tree.

        Args:
            args: ``data``, the frame in base64; ``last``, whether it is the last frame.

        Raises:
            SyncError: the contents are not the missing ones, or cannot be written.
        """
        async with self._taking:
            await self._in_thread(self._take, base64.b64decode(args["data"]), args["last"])

    def _expect(self, tree_hash: str) -> str:
        tree = Tree.decode(bytes(self._text), self._store.known)
        self._text.clear()
        if tree.hash != tree_hash:
            raise SyncError(f"a tree of the hash {tree.hash} came as {tree_hash}")
        missing = set(self._store.expect(tree))
        return f"{sum(1 << number for number, digest in enumerate(tree.contents) if digest in missing):x}"

    def _take(self, data: bytes, last: bool) -> None:
        self._store.take(data)
        if last:
            self._store.complete()

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return await asyncio.to_thread(function, *args)
        except (StoreError, PackError, TreeError) as error:
            raise SyncError(str(error)) from None


def _missing(tree: Tree, answers: list[str]) -> list[str]:
    """Return the digests of a tree's contents that at least one host lacks."""
    bits = _union(answers)
    return [digest for number, digest in enumerate(tree.contents) if bits >> number & 1]


def _union(answers: list[str]) -> int:
    bits = 0
    for each in answers:
        bits |= int(each, 16)
    return bits


async def _from(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield pieces up to the first empty one; produce each in a thread, so as not to block the event loop."""
    while piece := await asyncio.to_thread(next, pieces, b""):
        yield piece


async def send_to_all(broadcast: Broadcast, tree_hash: str, frames: AsyncIterator[bytes], op: str) -> list[Any]:
    """Send frames to all hosts, one after the other.

    Args:
        broadcast: sends a request to all hosts and returns their answers by replica.
        tree_hash: hash of the tree to which the frames belong.
        frames: the frames without the empty one at the end.
        op: operation that hosts execute for each frame: ``code-tree`` or ``code-contents``.

    Returns:
        the answer of each host to the last frame.

    Raises:
        SyncError: not all hosts have taken a frame within ``_HOSTS_TIMEOUT`` seconds.
    """
    first, waiting = True, b""
    async for frame in _with_terminator(frames):
        if waiting or not frame:
            args = {"tree": tree_hash, "data": base64.b64encode(waiting).decode(), "first": first, "last": not frame}
            try:
                answers = await asyncio.wait_for(broadcast(op, args), _HOSTS_TIMEOUT)
            except asyncio.TimeoutError:
                raise SyncError(f"not all hosts have taken a part of the code within {_HOSTS_TIMEOUT:g} s") from None
            first = False
        waiting = frame
    return list(answers.values())


async def _with_terminator(frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for frame in frames:
        yield frame
    yield b""


async def _frames(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the frames that a client sends, without the empty one at the end.

    Raises:
        SyncError: the client has disconnected, is silent for ``_SILENCE`` seconds, or sends a frame that is too long.
    """
    try:
        while size := int.from_bytes(await asyncio.wait_for(reader.readexactly(4), _SILENCE), "big"):
            if size > FRAME:
                raise SyncError(f"a frame of {size} bytes; at most {FRAME} are allowed")
            yield await asyncio.wait_for(reader.readexactly(size), _SILENCE)
    except asyncio.TimeoutError:
        raise SyncError(f"the client has sent nothing for {_SILENCE:g} s") from None
    except (asyncio.IncompleteReadError, OSError):
        raise SyncError("the client has disconnected") from None


async def distribute_code(run_queue: RunQueue, code: HostCode, tree_hash: str) -> None:
    """Send a tree from replica 0 to all hosts of an allocation if one lacks it; see ``HostCode.distribute_code``."""
    assert run_queue.handle_code is not None
    async with _locks.setdefault(run_queue, asyncio.Lock()):
        await code.distribute_code(run_queue.handle_code, tree_hash)
        run_queue.codes.add(tree_hash)


_locks: weakref.WeakKeyDictionary[RunQueue, asyncio.Lock] = weakref.WeakKeyDictionary()
"""Serialise the transfers to an allocation: one client at a time."""


async def serve_sync(
    run_queue: RunQueue, greeting: messages.Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Answer the requests of a client after a ``sync`` handshake, until it disconnects or a request fails."""
    run_queue.touch()
    async with _locks.setdefault(run_queue, asyncio.Lock()):
        while message := await messages.receive(reader, _SILENCE):
            try:
                with run_queue.transfer():
                    answered = await _serve(run_queue, message, reader, writer)
            except Exception as error:
                reason = str(error) or type(error).__name__
                await messages.send(writer, {"type": "failed", "reason": reason[:8000]})
                return
            if not answered:
                return


async def _serve(
    run_queue: RunQueue, message: messages.Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> bool:
    if run_queue.handle_code is None:
        raise SyncError("the hosts are not together yet")
    broadcast: Broadcast = run_queue.handle_code
    if message.get("type") == "probe":
        seen = await broadcast("code-probe", {"path": str(message["path"]), "text": str(message["text"])})
        return await messages.send(writer, {"type": "shared", "shared": all(seen.values())})
    if message.get("type") != "tree":
        raise SyncError(f"a request is probe or tree, not {message.get('type')!r:.40}")
    tree_hash = str(message["tree"])
    answers = (await broadcast("code-has", {"trees": [tree_hash, str(message.get("base"))]})).values()
    have, base = (all(answer[which] for answer in answers) for which in (0, 1))
    await messages.send(writer, {"type": "have", "have": have, "base": base})
    if have:
        run_queue.codes.add(tree_hash)
        return True
    missing = _union(await _relay(broadcast, tree_hash, reader, "code-tree"))
    await messages.send(writer, {"type": "missing", "missing": f"{missing:x}"})
    await _relay(broadcast, tree_hash, reader, "code-contents")
    run_queue.codes.add(tree_hash)
    return await messages.send(writer, {"type": "done"})


async def _relay(broadcast: Broadcast, tree_hash: str, reader: asyncio.StreamReader, op: str) -> list[Any]:
    frames = _frames(reader)
    try:
        return await send_to_all(broadcast, tree_hash, frames, op)
    except Exception:
        async for _ in frames:  # the client reads the answer only after it has sent all frames
            pass
        raise


async def _probe(code: HostCode, args: dict[str, Any]) -> bool:
    def look() -> bool:
        try:
            with open(safe_files.open_file(args["path"], any_owner=True), encoding="utf-8") as file:
                return file.read(1000) == str(args["text"])
        except (OSError, ValueError):
            return False

    return await asyncio.to_thread(look)


OPS: dict[str, Callable[[HostCode, dict[str, Any]], Awaitable[Any]]] = {
    "code-probe": _probe,
    "code-has": HostCode.has,
    "code-tree": HostCode.take_tree,
    "code-contents": HostCode.take_contents,
}
"""Operations on code that the host of an allocation executes, by name."""

RunQueue.KINDS["sync"] = serve_sync
