# SPDX-License-Identifier: BSD-3-Clause
"""The files of a part of a checkpoint: copy and check them, and bring them from host to host.

A host that fetches a part opens a connection to the host that has it, with the greeting ``checkpoint`` and its step,
attempt and replica as ``part``. The answer is one message: ``files``, with the path, the size and the checksum of
each, and then they come, one after the other; ``gone``; or ``failed`` with a ``reason``.

Checksums find damage, and are no protection: connections are authenticated, and this user alone can write the files.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import BinaryIO

from torchx_monarch.controller.host_messages import CheckpointPart, PartSource
from torchx_monarch.controller.host_network import HostNetwork, Peer
from torchx_monarch.model.codec import DecodeError, decode
from torchx_monarch.system import run_dirs, safe_files
from torchx_monarch.transport import messages
from torchx_monarch.transport.connections import Address, ConnectError

_PIECE = 1 << 22
"""Bytes that are read, sent and written at a time."""

_SILENCE = 60.0
"""Seconds for which the other host may be silent."""


class PartError(Exception):
    """A part of a checkpoint cannot be used, copied or fetched; the message says why."""


class PartGoneError(PartError):
    """A later checkpoint has taken the place of the one that a host asks for."""


@dataclasses.dataclass(frozen=True)
class PartFile:
    """A file of a part: its path below the part's folder, its size and checksum in bytes."""

    path: str
    size: int
    checksum: int = 0


class PartFiles:
    """The files of one part on this host, in one folder, in which other parts may have files, too.

    ``files`` are awaited: checksums are calculated in the background, from the moment at which a rank has written them.
    """

    def __init__(self, part: CheckpointPart, folder: str, files: asyncio.Future[tuple[PartFile, ...]]) -> None:
        self.part = part
        self.folder = folder
        self.files = files
        files.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def check(self) -> None:
        """Raise ``PartError`` if a file has changed. Files whose checksums are not known yet have just been written."""
        if self.files.done():
            checks = (asyncio.to_thread(_copy, self.folder, file, None) for file in self.files.result())
            await asyncio.gather(*checks)

    async def copy_to(self, folder: str, *, link: bool = False) -> None:
        """Copy all files into another folder, checked; with ``link`` link those that it lacks there if possible."""
        for file in await self.files:
            await asyncio.to_thread(_link if link else _copy, self.folder, file, os.path.join(folder, file.path))

    async def remove(self, linked: str) -> None:
        """Remove the files, also from the folder in which they may be linked."""
        with contextlib.suppress(PartError):
            for file in await self.files:
                await asyncio.to_thread(_remove, os.path.join(self.folder, file.path), os.path.join(linked, file.path))

    async def send(self, peer: Peer) -> None:
        files = await self.files
        if not await peer.send({"type": "files", "files": files}):
            return
        for file in files:
            descriptor = await asyncio.to_thread(_open, self.folder, file)
            try:
                for start in range(0, file.size, _PIECE):
                    piece = await asyncio.to_thread(os.pread, descriptor, min(_PIECE, file.size - start), start)
                    if not await messages.send_bytes(peer.writer, piece):
                        return
            finally:
                os.close(descriptor)


async def checked(folder: str, sizes: Mapping[str, int]) -> tuple[PartFile, ...]:
    """Return the files of a folder with their checksums."""
    files = [PartFile(path, size) for path, size in sizes.items()]
    sums = [await asyncio.to_thread(_copy, folder, file, None, known=False) for file in files]
    return tuple(dataclasses.replace(file, checksum=found) for file, found in zip(files, sums, strict=True))


def _open(folder: str, file: PartFile) -> int:
    try:
        descriptor = safe_files.open_file(os.path.join(folder, file.path), below=folder)
    except OSError as error:
        raise PartError(f"{file.path}: {error.strerror}") from None
    if (size := os.fstat(descriptor).st_size) != file.size:
        os.close(descriptor)
        raise PartError(f"{file.path} has {size} bytes instead of {file.size}")
    return descriptor


def _copy(folder: str, file: PartFile, target: str | None, known: bool = True) -> int:
    """Read a file, and copy it to a target unless that is None; return its checksum, checked if it is known."""
    checksum = 0
    with open(_open(folder, file), "rb", buffering=0) as source, _aside(target) as output:
        while piece := source.read(_PIECE):
            checksum = zlib.crc32(piece, checksum)
            if output is not None:
                output.write(piece)
        if known and checksum != file.checksum:
            raise PartError(f"{file.path} is damaged: its checksum is another one")
    return checksum


@contextlib.contextmanager
def _aside(target: str | None) -> Iterator[BinaryIO | None]:
    """Yield a new file, which gets the path of the target at the end if there is no error; None without a target."""
    if target is None:
        yield None
        return
    os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
    aside = f"{target}.{os.urandom(8).hex()}"
    try:
        with open(aside, "xb", buffering=0) as output:
            yield output
        os.replace(aside, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise


def _remove(path: str, link: str) -> None:
    with contextlib.suppress(OSError):
        if os.path.samefile(path, link):
            os.unlink(link)
    run_dirs.remove_tree(path)


def _link(folder: str, file: PartFile, target: str) -> None:
    _copy(folder, file, None)
    if os.path.exists(target):
        return
    os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
    try:
        os.link(os.path.join(folder, file.path), target)
    except OSError:  # one of them is in memory, and the other on the disk
        _copy(folder, file, target)


class PartExchange:
    """Bring parts from host to host.

    Args:
        find: returns the files of a part by its step, attempt and replica; None if this host has none.
    """

    def __init__(self, network: HostNetwork, find: Callable[[tuple[int, ...]], PartFiles | None]) -> None:
        self._network = network
        self._find = find
        network.handlers["checkpoint"] = self._serve

    async def _serve(self, peer: Peer) -> None:
        try:
            if (files := self._find(decode(tuple[int, ...], peer.greeting.get("part"), "part"))) is None:
                await peer.send({"type": "gone"})
            else:
                await files.send(peer)
        except (PartError, OSError, DecodeError) as error:
            await peer.send({"type": "failed", "reason": str(error)[: messages.MAX_ERROR]})

    async def fetch(self, source: PartSource, folder: str, *, gently: bool) -> tuple[PartFile, ...]:
        """Fetch the files of a part into a folder, from the first address that has them; those that it has stay.

        ``gently``: use the connection half of the time, and leave the rest to the ranks.

        Raises:
            PartError: none has them.
        """
        why = PartError("no host has it")
        for address in source.addresses:
            try:
                return await self._fetch(address, source.part, folder, gently)
            except PartError as error:
                why = error
            except (asyncio.IncompleteReadError, TimeoutError, asyncio.TimeoutError):
                why = PartError(f"{address} has disconnected, or sent nothing for {_SILENCE:g} s")
            except (ConnectError, messages.ProtocolError, OSError, ValueError) as error:
                why = PartError(str(error))
        raise why

    async def _fetch(self, address: str, part: CheckpointPart, folder: str, gently: bool) -> tuple[PartFile, ...]:
        greeting = {"type": "checkpoint", "part": (part.step, part.attempt, part.replica)}
        reader, writer = await self._network.greet(Address.parse(address, "its address"), greeting)
        with contextlib.closing(writer):
            answer = await messages.receive(reader, _SILENCE) or {"reason": "it has disconnected"}
            if answer.get("type") == "gone":
                raise PartGoneError(f"{address} has this checkpoint no more")
            if answer.get("type") != "files":
                raise PartError(str(answer.get("reason")))
            files = decode(tuple[PartFile, ...], answer.get("files"), "files")
            for file in files:
                if os.path.isabs(file.path) or os.path.normpath(file.path) != file.path or file.path.startswith(".."):
                    raise PartError(f"{file.path!r} is no path of a file in a folder")
                await self._receive(reader, file, os.path.join(folder, file.path), gently)
        return files

    async def _receive(self, reader: asyncio.StreamReader, file: PartFile, target: str, gently: bool) -> None:
        is_there = await asyncio.to_thread(os.path.exists, target)
        writing, checksum = _aside(None if is_there else target), 0
        output = await asyncio.to_thread(writing.__enter__)
        with contextlib.ExitStack() as ending:
            ending.push(writing)
            for start in range(0, file.size, _PIECE):
                began = time.monotonic()
                piece = await asyncio.wait_for(reader.readexactly(min(_PIECE, file.size - start)), _SILENCE)
                checksum = await asyncio.to_thread(_write, output, piece, checksum)
                if gently:
                    await asyncio.sleep(time.monotonic() - began)
            if checksum != file.checksum:
                raise PartError(f"{file.path} was damaged on its way")
            ending.pop_all()
        await asyncio.to_thread(writing.__exit__, None, None, None)


def _write(output: BinaryIO | None, piece: bytes, checksum: int) -> int:
    if output is not None:
        output.write(piece)
    return zlib.crc32(piece, checksum)
