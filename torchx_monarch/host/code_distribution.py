# SPDX-License-Identifier: BSD-3-Clause
"""Bring code to the hosts of a live allocation: a client sends it to replica 0, and hosts pass it on to each other.

A client sends a greeting ``sync`` for each request; replica 0 answers with one message, or ``failed`` and a ``reason``.

==================  ====================================================================================================
``path``            whether every host sees this file: the answer is ``shared``
``tree``            the hash of a workspace: the answer is ``have``, whether replica 0 has it, and if not the
                    ``digests`` of the contents that it has, of each the first 16 digits
``tree``, ``size``  the size in bytes of an upload of this workspace: the answer is ``ready``. Then the client sends it,
                    and the answer is ``done``
==================  ====================================================================================================

When a run begins, each host that lacks its tree opens a connection of its own to replica 0, with the greeting ``code``,
the field ``tree``, the names of the uploads that it ``has``, and the ``address`` at which it passes them on. Replica 0
has it wait until a host that has the tree is free, and answers with the ``source``, the address of that host. The host
connects there with the same greeting, and tells replica 0 whether it has ``received`` the tree. If not, because that
host has been lost or sends something else, it gets the tree from replica 0. Its source sends the names and sizes of the
``uploads`` that it lacks, and then these, as they came from the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from torchx_monarch.code_sync.code_store import CodeStore
from torchx_monarch.code_sync.upload import PIECE, Upload, UploadError
from torchx_monarch.controller.host_messages import ProbeFile
from torchx_monarch.controller.host_network import HostNetwork, Peer
from torchx_monarch.controller.run_queue import RunQueue
from torchx_monarch.model.world import LaunchError
from torchx_monarch.system import run_dirs
from torchx_monarch.transport import messages
from torchx_monarch.transport.connections import Address, AddressError, ConnectError

_SILENCE = 60.0
"""Seconds that the other side may be silent during a transfer; it may be reading a large file from a slow disk."""

_FAN_OUT = 2
"""Hosts to which a host sends a tree at a time. 1 would be the fastest if all were alike; with 2 a slow one delays no
other."""

_REMOVAL_DELAY = 1.0
"""Seconds after which the code of the run before is removed, so as not to delay the start of the ranks."""


class HostCode:
    """The code on one host: receive it, send it to other hosts, and check it out for runs.

    Its methods raise ``LaunchError`` if another side breaks off, is silent or sends something else, or this host cannot
    store or check out the code.

    Args:
        folder: path of the code store, which is created.
        network: of this host.
    """

    def __init__(self, folder: str, network: HostNetwork) -> None:
        self._store = CodeStore(folder)
        self._network = network
        network.handlers.setdefault("code", self.serve_host)
        self._tree = ""  # that the hosts pass on
        self._free = asyncio.Queue[str]()  # the addresses of its sources, as often as they can send it; empty for this

    async def checkout(self, tree_hash: str, workspace: str) -> str:
        """Check out a tree for the next run, which is of the given workspace; return the folder that it works in."""
        if not self._store.has(tree_hash):
            await self._fetch(tree_hash)
        folder: str
        folder, unused = await self._in_thread(self._store.checkout, tree_hash, workspace)
        loop = asyncio.get_running_loop()
        loop.call_later(_REMOVAL_DELAY, loop.run_in_executor, None, run_dirs.remove_tree, unused)
        return folder

    async def _fetch(self, tree_hash: str) -> None:
        address = ""  # if it cannot listen, it passes nothing on
        with contextlib.suppress(ConnectError, ValueError):
            address = self._network.listen()
        has = [upload.name for upload in await self._in_thread(self._store.uploads)]
        greeting = {"type": "code", "tree": tree_hash, "has": has, "address": address}
        try:
            reader, writer = await self._network.connect(greeting)
            with contextlib.closing(writer):
                answer = await messages.receive(reader)  # when a source is free, or replica 0 is lost
                if answer and "source" in answer:
                    received = await self._fetch_from(str(answer["source"]), greeting)
                    await messages.send(writer, {"type": "code", "received": received})
                    if received:
                        return
                    answer = await messages.receive(reader, _SILENCE)
                await self._receive_tree(tree_hash, answer or {"reason": "replica 0 has disconnected"}, reader)
                await messages.send(writer, {"type": "code", "received": True})
        except (ConnectError, messages.ProtocolError, TimeoutError) as error:
            raise LaunchError(f"the code {tree_hash:.12} is not on this host: {error}") from None

    async def _fetch_from(self, source: str, greeting: messages.Message) -> bool:
        """Get a tree from another host; return whether it has come."""
        try:
            reader, writer = await self._network.greet(Address.parse(source, "source"), greeting)
            with contextlib.closing(writer):
                answer = await messages.receive(reader, _SILENCE)
                await self._receive_tree(greeting["tree"], answer or {"reason": "it has disconnected"}, reader)
        except (AddressError, ConnectError, LaunchError, messages.ProtocolError, TimeoutError):
            return False
        return True

    async def _receive_tree(self, tree_hash: str, answer: messages.Message, reader: asyncio.StreamReader) -> None:
        """Receive the uploads that an answer announces, check them and store them."""
        if "uploads" not in answer:
            raise LaunchError(str(answer.get("reason")))
        received = [await self._receive(name, size, reader) for name, size in answer["uploads"]]
        await self._in_thread(self._store.add, tree_hash, received)

    async def distribute(self, peer: Peer) -> None:
        """Have a host get a tree, after its greeting ``code``: from this one, replica 0, or from another one."""
        tree_hash = str(peer.greeting.get("tree"))
        if tree_hash != self._tree:
            self._tree, self._free = tree_hash, asyncio.Queue()
            self._add_source("")
        free, is_held, fails = self._free, True, False
        source = await free.get()

        def give_back() -> None:
            nonlocal is_held
            if is_held and not fails:
                free.put_nowait(source)
            is_held = False

        # A host that stands still must not keep others from the source.
        timer = asyncio.get_running_loop().call_later(_SILENCE, give_back)
        try:
            if source:
                await peer.send({"type": "source", "source": source})
                answer = await peer.receive()
                fails = answer is not None and answer.get("received") is not True
            if fails or not source:
                await self.serve_host(peer)
                answer = await peer.receive()
        finally:
            timer.cancel()
            give_back()
        address = str(peer.greeting.get("address") or "")
        if answer is not None and address and free is self._free:
            self._add_source(address)

    def _add_source(self, address: str) -> None:
        for _ in range(_FAN_OUT):
            self._free.put_nowait(address)

    async def serve_host(self, peer: Peer) -> None:
        """Send another host the uploads of a tree that it lacks."""
        try:
            uploads = self._store.find(str(peer.greeting.get("tree")))
        except UploadError as error:
            await peer.send({"type": "failed", "reason": str(error)})
            return
        lacking = [upload for upload in uploads if upload.name not in peer.greeting.get("has", [])]
        await peer.send({"type": "uploads", "uploads": [(upload.name, upload.size) for upload in lacking]})
        for upload in lacking:
            for start in range(0, upload.size, PIECE):
                if not await messages.send_bytes(peer.writer, await asyncio.to_thread(upload.read, start)):
                    return

    async def serve_client(self, run_queue: RunQueue, peer: Peer) -> None:
        """Answer a request of a client, after its greeting ``sync``."""
        try:
            with run_queue.in_use():
                answer = await self._answer(run_queue, peer)
        except Exception as error:
            answer = {"type": "failed", "reason": (str(error) or type(error).__name__)[:8000]}
        await peer.send(answer)

    async def _answer(self, run_queue: RunQueue, peer: Peer) -> messages.Message:
        request = peer.greeting
        if "path" in request:
            seen = await run_queue.hosts.broadcast(ProbeFile(str(request["path"])))
            return {"type": "shared", "shared": all(seen)}
        tree_hash = str(request["tree"])
        if "size" in request:
            received = await self._receive(str(time.time_ns()), int(request["size"]), peer.reader, peer)
            await self._in_thread(self._store.add, tree_hash, [received])
            return {"type": "done"}
        have = self._store.has(tree_hash)
        return {"type": "have", "have": have, "digests": [] if have else await self._in_thread(self._store.digests)}

    async def _receive(self, name: str, size: int, reader: asyncio.StreamReader, client: Peer | None = None) -> Upload:
        """Receive an upload, for which there is space; a client begins when it is told so."""
        upload: Upload = await self._in_thread(self._store.new_upload, name, size)
        if client is not None:
            await client.send({"type": "ready"})
        try:
            while upload.size < size:
                piece = await asyncio.wait_for(reader.readexactly(min(size - upload.size, PIECE)), _SILENCE)
                await self._in_thread(upload.append, piece)
        except asyncio.TimeoutError:
            raise LaunchError(f"the other side has sent nothing for {_SILENCE:g} s") from None
        except (asyncio.IncompleteReadError, OSError):
            raise LaunchError("the other side has disconnected") from None
        return upload

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return await asyncio.to_thread(function, *args)
        except UploadError as error:
            raise LaunchError(str(error)) from None
        except OSError as error:
            where = error.filename or self._store.folder
            raise LaunchError(f"cannot store the code on this host: {error.strerror}: {where}") from None
