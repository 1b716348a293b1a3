# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Code on its way to the hosts of a live allocation: from a client to replica 0 once, and on to all of them together.

A client greets with ``sync``, and then sends one JSON line after the other; each is answered by one.

=========  =============================================================================================================
``probe``  whether every host sees the file ``path`` with the text ``text``: the answer is ``shared``
``tree``   the hash ``tree`` of a workspace, and ``base``, that of another: the answer is ``have`` and ``base``, whether
           every host has the one and the other. Where not the first, the client sends the tree itself in frames
           (``Tree.encode``), as it differs from the base where that is known; the answer is ``missing``, the bits of a
           number: the contents that a host lacks, of ``Tree.contents`` in order. It sends those in frames (``pack``);
           the answer is ``done``
=========  =============================================================================================================

A frame is its length (4 bytes) and so many bytes, at most ``FRAME``; one of no bytes is the last. ``failed`` with a
``reason`` stands for any answer. Replica 0 keeps nothing of it: each frame goes to all hosts by one call of their
agents, and they take the next when all have taken this one. Until a host has all of a tree, it has nothing of it.
"""

from __future__ import annotations

import asyncio
import base64
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

from torchx_monarch.code_sync.archive import PackError
from torchx_monarch.code_sync.code_store import CodeStore, StoreError
from torchx_monarch.code_sync.manifest import MAX_TREE, Tree, TreeError
from torchx_monarch.controller.run_queue import RunQueue
from torchx_monarch.model.world import LaunchError
from torchx_monarch.transport import messages

if TYPE_CHECKING:
    from torchx_monarch.host.session_host import SessionHost

FRAME = 1 << 19
"""Bytes. As text in a message between agent and host, which has at most ``protocol.MAX_MESSAGE``, it is 0.7 MB."""

_SILENCE = 60.0
"""Seconds that a client may say nothing in the middle of it; it may be reading a large file on a slow disk."""

_HOSTS_TIMEOUT = 120.0
"""Seconds in which every host has taken a frame."""

Broadcast = Callable[[str, dict[str, Any]], Awaitable[dict[int, Any]]]


class SyncError(LaunchError):
    """The code could not be brought to the hosts; the message says why."""


class HostCode:
    """One host's end.

    Args:
        folder: of the store, to be made.
    """

    def __init__(self, folder: str) -> None:
        self._store = CodeStore(folder)
        self._text = bytearray()
        self._working = ""

    async def enter(self, tree_hash: str) -> str:
        """The folder with a tree that the next run works in.

        Raises:
            SyncError: it is not here, or cannot be made.
        """
        self._working = await self._in_thread(self._store.acquire, tree_hash)
        return self._working

    async def leave(self) -> None:
        """The run is over, if there was one."""
        working, self._working = self._working, ""
        if working:
            await self._in_thread(self._store.release, working)

    async def has(self, args: dict[str, Any]) -> list[bool]:
        """Which of some trees are here."""
        return [self._store.known(tree_hash) is not None for tree_hash in args["trees"]]

    async def hand_on(self, broadcast: Broadcast, tree_hash: str) -> None:
        """Have the other hosts get a tree from here, where one came in the place of another that had it.

        Raises:
            SyncError: it is not here either, or one could not take it.
        """
        if all(have for (have,) in (await broadcast("code-has", {"trees": [tree_hash]})).values()):
            return
        tree = await self._in_thread(self._store.tree, tree_hash)
        encoded = await self._in_thread(tree.encode)
        parts = (encoded[at : at + FRAME] for at in range(0, len(encoded), FRAME))
        missing = _missing(tree, await spread(broadcast, tree_hash, _from(parts), "code-tree"))
        await spread(broadcast, tree_hash, _from(self._store.pieces(tree, missing)), "code-contents")

    async def take_tree(self, args: dict[str, Any]) -> str | None:
        """A frame of a tree; with the last one, the contents of it that are missing here, as bits.

        Raises:
            SyncError: it is no tree, or another one, or there is no room.
        """
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
        """A frame of contents; with the last one, all of them are here.

        Raises:
            SyncError: they are not what was missing, or cannot be written.
        """
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
    """The digests of a tree that a host has said to lack."""
    bits = _either(answers)
    return [digest for number, digest in enumerate(tree.contents) if bits >> number & 1]


def _either(answers: list[str]) -> int:
    bits = 0
    for each in answers:
        bits |= int(each, 16)
    return bits


async def _from(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """What takes time to make, made beside the event loop."""
    while piece := await asyncio.to_thread(next, pieces, b""):
        yield piece


async def spread(broadcast: Broadcast, tree_hash: str, frames: AsyncIterator[bytes], op: str) -> list[Any]:
    """Give every host frame after frame.

    Args:
        broadcast: asks all of them.
        tree_hash: of what they belong to.
        frames: up to the last that holds something.
        op: what the hosts are to do with them.

    Returns:
        what they answer to the last.

    Raises:
        SyncError: not all of them have taken one in time.
    """
    first, waiting = True, b""
    async for frame in _and_end(frames):
        if waiting or not frame:
            args = {"tree": tree_hash, "data": base64.b64encode(waiting).decode(), "first": first, "last": not frame}
            try:
                answers = await asyncio.wait_for(broadcast(op, args), _HOSTS_TIMEOUT)
            except asyncio.TimeoutError:
                raise SyncError(f"not all hosts have taken a part of the code within {_HOSTS_TIMEOUT:g} s") from None
            first = False
        waiting = frame
    return list(answers.values())


async def _and_end(frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for frame in frames:
        yield frame
    yield b""


async def _frames(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """What a client sends.

    Raises:
        SyncError: it has gone, or says nothing, or sends something else.
    """
    try:
        while size := int.from_bytes(await asyncio.wait_for(reader.readexactly(4), _SILENCE), "big"):
            if size > FRAME:
                raise SyncError(f"a frame of {size} bytes; at most {FRAME} are allowed")
            yield await asyncio.wait_for(reader.readexactly(size), _SILENCE)
    except asyncio.TimeoutError:
        raise SyncError(f"the client has sent nothing for {_SILENCE:g} s") from None
    except (asyncio.IncompleteReadError, OSError):
        raise SyncError("the client has gone") from None


async def hand_on(run_queue: RunQueue, code: HostCode, tree_hash: str) -> None:
    """Have all hosts of an allocation have a tree that replica 0's has; see ``HostCode.hand_on``."""
    assert run_queue.broadcast is not None
    async with _locks.setdefault(run_queue, asyncio.Lock()):
        await code.hand_on(run_queue.broadcast, tree_hash)
        run_queue.codes.add(tree_hash)


_locks: weakref.WeakKeyDictionary[RunQueue, asyncio.Lock] = weakref.WeakKeyDictionary()
"""One client at a time brings code to an allocation."""


async def serve_sync(
    run_queue: RunQueue, greeting: messages.Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Answer a client that has greeted with ``sync``, until it goes."""
    run_queue.touch()
    async with _locks.setdefault(run_queue, asyncio.Lock()):
        while message := await messages.receive(reader, _SILENCE):
            try:
                answered = await _serve(run_queue, message, reader, writer)
            except Exception as error:
                reason = str(error) or type(error).__name__
                await messages.send(writer, {"type": "failed", "reason": reason[:8000]})
                return
            finally:
                run_queue.touch()
            if not answered:
                return


async def _serve(
    run_queue: RunQueue, message: messages.Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> bool:
    if run_queue.broadcast is None:
        raise SyncError("the hosts are not together yet")
    broadcast: Broadcast = run_queue.broadcast
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
    missing = _either(await _relay(broadcast, tree_hash, reader, "code-tree"))
    await messages.send(writer, {"type": "missing", "missing": f"{missing:x}"})
    await _relay(broadcast, tree_hash, reader, "code-contents")
    run_queue.codes.add(tree_hash)
    return await messages.send(writer, {"type": "done"})


async def _relay(broadcast: Broadcast, tree_hash: str, reader: asyncio.StreamReader, op: str) -> list[Any]:
    frames = _frames(reader)
    try:
        return await spread(broadcast, tree_hash, frames, op)
    except Exception:
        async for _ in frames:  # the client hears of it when it has sent them all: until then it does not listen
            pass
        raise


async def _probe(host: SessionHost, args: dict[str, Any]) -> bool:
    def look() -> bool:
        try:
            with open(args["path"], encoding="utf-8") as file:
                return file.read(1000) == str(args["text"])
        except (OSError, ValueError):
            return False

    return await asyncio.to_thread(look)


async def _has(host: SessionHost, args: dict[str, Any]) -> list[bool]:
    return await host.code.has(args)


async def _tree(host: SessionHost, args: dict[str, Any]) -> str | None:
    return await host.code.take_tree(args)


async def _contents(host: SessionHost, args: dict[str, Any]) -> None:
    await host.code.take_contents(args)


OPS = {"code-probe": _probe, "code-has": _has, "code-tree": _tree, "code-contents": _contents}
"""For ``SessionHost.OPS``."""

RunQueue.KINDS["sync"] = serve_sync
