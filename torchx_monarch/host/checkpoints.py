# SPDX-License-Identifier: BSD-3-Clause
"""The checkpoints that a host keeps in memory for the ranks of one run: ``training.checkpoint`` is the ranks' side.

``generation_STEP_ATTEMPT`` has the files of a checkpoint whose ranks on this host are done, and ``copy_STEP_ATTEMPT`` a
copy of what another host has of it. Replica 0 knows which checkpoints are whole (``controller.checkpoints``).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from torchx_monarch.controller.host_messages import (
    CheckpointPart,
    CheckpointParts,
    KeepCheckpoints,
    PartSource,
    PersistCheckpoint,
    RestoreCheckpoint,
)
from torchx_monarch.host.checkpoint_files import PartError, PartExchange, PartFile, PartFiles, PartGoneError, checked
from torchx_monarch.host.host import Host
from torchx_monarch.insight.stacks import rank_ranges
from torchx_monarch.model.codec import decode
from torchx_monarch.model.world import World
from torchx_monarch.system import run_dirs, safe_files
from torchx_monarch.system.cgroups import room_in
from torchx_monarch.system.run_dirs import MemoryDir
from torchx_monarch.training import saved
from torchx_monarch.training.checkpoint import WRITING, Written
from torchx_monarch.transport.connections import ConnectError

_MIN_WAITING = 3
"""Checkpoints that wait for a rank of this host which has saved none of them, from which on the log says so: a program
in which rank 0 alone saves, and does not say so, would have none without a word."""

_OWN = 2
"""Checkpoints of this host that stay although replica 0 does not know yet whether they are whole."""


class HostCheckpoints:
    """Keep the checkpoints of a run, and report the parts when ranks have completed one.

    Attributes:
        folder: for the ranks.
        world: the ranks of the present attempt; None before the first.
    """

    def __init__(self, host: Host, memory: MemoryDir) -> None:
        self._host = host
        self.folder, self._lock = memory
        self._disk = os.path.join(host.sockets, os.path.basename(self.folder))
        os.symlink(self._disk, os.path.join(self.folder, "disk"))
        self._parts: dict[tuple[int, ...], PartFiles] = {}  # by step, attempt and replica
        self._whole: set[tuple[int, ...]] = set()  # steps and attempts
        self._exchange = PartExchange(host.network, self._parts.get)
        self.world: World | None = None
        self._said = set[str]()
        self._changing = asyncio.Lock()
        self._fetching = set[str]()
        self._given = ""  # what ``last`` leads to
        self._scan_due = asyncio.Event()
        self._ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._ready.bind(os.path.join(self.folder, "ready"))
        asyncio.get_running_loop().add_reader(self._ready, self._on_ready)
        self._following = asyncio.ensure_future(self._follow())

    @classmethod
    async def create(cls, host: Host) -> HostCheckpoints:
        name = f"{host.options.app}-{host.options.role}-{host.options.replica}"
        return cls(host, await asyncio.to_thread(run_dirs.new_memory_dir, name))

    def close(self) -> Callable[[], None]:
        """Keep checkpoints no more; return what frees the memory, which takes a while."""
        self._following.cancel()
        asyncio.get_running_loop().remove_reader(self._ready)
        self._ready.close()
        return self._free

    def _free(self) -> None:
        for folder in (self.folder, self._disk):
            run_dirs.remove_tree(folder)
        os.close(self._lock)

    async def find(self) -> CheckpointParts:
        await self._scan()
        return self._listed()

    async def _report(self) -> None:
        is_closed = self._ready.fileno() < 0
        if self._host.report is not None and not is_closed:
            await self._host.report(self._listed())

    def _listed(self) -> CheckpointParts:
        address = ""
        if self._parts and self._host.options.replicas > 1:
            try:
                address = self._host.network.listen()
            except (ConnectError, ValueError) as error:
                self._say(f"no other host can fetch its checkpoints: {error}")
        return CheckpointParts(tuple(files.part for files in self._parts.values()), address)

    def _say(self, text: str) -> None:
        """Say something once."""
        if text not in self._said:
            self._said.add(text)
            self._host.reporter.line(f"host {self._host.options.replica}: {text}")

    # -- what ranks write ----------------------------------------------------------------------------------------------

    def _on_ready(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._ready.recv(1)
                self._scan_due.set()

    async def _follow(self) -> None:
        while True:
            await self._scan_due.wait()
            self._scan_due.clear()
            if await self._scan():
                await self._report()

    async def _scan(self) -> bool:
        """Find what the ranks of this host have completed; return whether there is something new."""
        async with self._changing:
            found = await asyncio.to_thread(self._completed)
            for part, folder, sizes in found:
                self._add(part, folder, asyncio.ensure_future(checked(folder, sizes)))
            if found:
                own = {key[:2] for key in self._parts if key[2] == self._host.options.replica}
                await self._drop_all_but({*self._whole, *sorted(own)[-_OWN:]})
            return bool(found)

    def _completed(self) -> list[tuple[CheckpointPart, str, dict[str, int]]]:
        found: list[tuple[CheckpointPart, str, dict[str, int]]] = []
        if (world := self.world) is None:
            return found
        own = world.place(self._host.options.replica).ranks
        waiting = list[Collection[int]]()
        for path, step in self._writing():
            try:
                written = _written(path, own)
                if (part := self._part(world, written, step)) is None:
                    waiting += [written.keys()] if written else []
                    continue
                sizes = saved.sizes(os.path.join(path, saved.step_name(step)))
                size = sum(sizes.values())
                safe_files.replace_file(os.path.join(self.folder, "size"), str(size).encode())
                self._remove(generation := self._generation(step, part.attempt))
                os.rename(path, generation)
                folder = os.path.join(generation, saved.step_name(step))
                found.append((dataclasses.replace(part, size=size), folder, sizes))
            except (OSError, ValueError, saved.NotWholeError) as error:
                self._say(f"the checkpoint of step {step} is not kept: {error}")
                self._remove(path)
        if len(waiting) >= _MIN_WAITING and (lacking := {*own}.difference(*waiting)):
            who, savers = rank_ranges(sorted(lacking)), sorted({*own} - lacking)
            why = f"because {who} of this host did not save them"
            instead = f"if only {rank_ranges(savers)} saves: checkpoint(step, ranks={savers})"
            self._say(f"{_MIN_WAITING} checkpoints do not count, {why}; {instead}")
        return found

    def _writing(self) -> list[tuple[str, int]]:
        """Return the folders that ranks write, with their steps; a link is one to the disk alone."""
        found = []
        for name in os.listdir(self.folder):
            path, step = os.path.join(self.folder, name), name[len(WRITING) :]
            if not (name.startswith(WRITING) and step.isdecimal() and len(step) < 17):
                continue
            if there := _target(path):
                if there != os.path.join(self._disk, name):
                    run_dirs.remove_tree(path)
                    continue
                self._say(f"the memory has no room for its checkpoints, which go to {self._disk}")
            found.append((path, int(step)))
        return sorted(found, key=lambda entry: entry[1])

    def _generation(self, step: int, attempt: int) -> str:
        return os.path.join(self.folder, f"generation_{step}_{attempt}")

    def _part(self, world: World, written: Mapping[int, Written], step: int) -> CheckpointPart | None:
        """Return the part of the ranks of this host if they are all done."""
        replica = self._host.options.replica
        if not written:
            return None
        said = next(iter(written.values()))
        own = world.place(replica).ranks
        if any(rank not in written and (not said.ranks or rank in said.ranks) for rank in own):
            return None
        if any(other != said for other in written.values()):
            raise ValueError("its ranks have called it with different arguments")
        ranks = tuple(written)
        more = (said.persist, said.persist_every, said.shared)
        return CheckpointPart(step, world.attempt, replica, ranks, said.ranks, world.size, 0, *more)

    def _add(self, part: CheckpointPart, folder: str, files: asyncio.Future[tuple[PartFile, ...]]) -> PartFiles:
        added = self._parts[part.step, part.attempt, part.replica] = PartFiles(part, folder, files)
        return added

    async def _drop_all_but(self, checkpoints: Collection[tuple[int, ...]]) -> None:
        """Free the memory of all but some checkpoints, given by their steps and attempts, and of what ranks gave up."""
        for key in [key for key in self._parts if key[:2] not in checkpoints]:
            del self._parts[key]
        newest = max((step for step, *_ in self._parts), default=-1)
        stay = {os.path.dirname(files.folder) for files in self._parts.values()} | self._fetching
        stay.add(os.path.dirname(self._given))

        def remove() -> None:
            for name in os.listdir(self.folder):
                path = os.path.join(self.folder, name)
                if name.startswith(("generation_", "copy_")) and path not in stay:
                    self._remove(path)
            for path, step in self._writing():
                if step < newest:
                    self._remove(path)

        await asyncio.to_thread(remove)

    def _remove(self, path: str) -> None:
        """Remove a folder of a checkpoint, or the link to it and the folder on the disk."""
        if os.path.dirname(there := _target(path)) == self._disk:
            run_dirs.remove_tree(there)
        run_dirs.remove_tree(path)

    # -- what replica 0 asks for ---------------------------------------------------------------------------------------

    async def keep(self, request: KeepCheckpoints) -> None:
        self._whole = {*request.whole}
        async with self._changing:
            await self._drop_all_but({*self._whole, *(key[:2] for key in self._newer())})
        source = request.copy
        if source is not None and (source.part.step, source.part.attempt, source.part.replica) not in self._parts:
            part = source.part
            path = os.path.join(self.folder, f"copy_{part.step}_{part.attempt}_{part.replica}")
            self._fetching.add(path)
            try:
                folder = await asyncio.to_thread(self._new_folder, path, part)
                await self._fetch(source, folder, gently=True)
            except PartGoneError:
                pass  # the next one will be copied
            except (PartError, OSError) as error:
                self._say(f"no copy of the checkpoints of host {part.replica}: {error}")
            finally:
                self._fetching.discard(path)
        await self._report()

    def _newer(self) -> list[tuple[int, ...]]:
        newest = max(self._whole, default=(-1, -1), key=lambda checkpoint: checkpoint[::-1])
        return [key for key in self._parts if key[1::-1] > newest[::-1]]

    def _new_folder(self, path: str, part: CheckpointPart) -> str:
        """Return the folder for the files of a part; it is made in memory, or on the disk with a link to it there."""
        if not os.path.lexists(path):
            if part.size > room_in(self.folder):
                there = os.path.join(self._disk, os.path.basename(path))
                os.makedirs(there, mode=0o700, exist_ok=True)
                os.symlink(there, path)
                self._say(f"the memory has no room for all checkpoints, of which some go to {self._disk}")
            else:
                os.mkdir(path, 0o700)
        os.makedirs(folder := os.path.join(path, saved.step_name(part.step)), mode=0o700, exist_ok=True)
        return folder

    async def restore(self, request: RestoreCheckpoint) -> str:
        """Have ``last`` lead to the files of a checkpoint, and remove what the ranks before have written later."""
        async with self._changing:
            checkpoints = {key[:2] for key in self._parts}
            chosen = [(source.part.step, source.part.attempt) for source in request.sources[:1]]
            await asyncio.to_thread(self._give, None)
            earlier = {key for key in checkpoints if chosen and key[0] < chosen[0][0]}
            await self._drop_all_but({*chosen, *earlier})
        if not chosen:
            return ""
        part = request.sources[0].part
        try:
            folder = await asyncio.to_thread(self._new_folder, self._generation(part.step, part.attempt), part)
            for source in request.sources:
                part = source.part
                await self._bring(source, folder)
        except (PartError, OSError) as error:
            return f"host {self._host.options.replica} lacks the part of host {part.replica}: {error}"
        await asyncio.to_thread(self._give, folder)
        return ""

    def _give(self, folder: str | None) -> None:
        """Have ``last`` lead to a folder, or to none; remove what ranks have not completed."""
        for path, _ in self._writing():
            self._remove(path)
        last = os.path.join(self.folder, "last")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(last)
        self._given = folder or ""
        if folder is not None:
            os.symlink(folder, last)

    async def _bring(self, source: PartSource, folder: str) -> None:
        """Bring the files of a part into a folder, from this host if it has them undamaged, else from another one."""
        part = source.part
        key = part.step, part.attempt, part.replica
        if (held := self._parts.get(key)) is not None:
            try:
                if held.folder == folder:
                    await held.check()
                else:
                    await held.copy_to(folder, link=True)
                return
            except PartError as error:
                self._say(f"its part of the checkpoint of step {part.step} cannot be used: {error}")
                del self._parts[key]
                await held.remove(folder)
        if not source.is_needed and part.size > room_in(folder):
            self._say(f"no room for what host {part.replica} has of the checkpoint of step {part.step}")
            return
        await self._fetch(source, folder, gently=False)

    async def _fetch(self, source: PartSource, folder: str, *, gently: bool) -> None:
        fetching = asyncio.ensure_future(self._exchange.fetch(source, folder, gently=gently))
        await fetching
        self._add(source.part, folder, fetching)

    async def persist(self, request: PersistCheckpoint) -> str:
        """Copy parts to the folder of the user, make a checkpoint of all parts there, or remove them."""
        held = [self._parts.get((request.step, request.attempt, replica)) for replica in request.replicas]
        folder, token = Path(request.folder), f"{self._host.options.app}-{request.attempt}"
        aside = saved.part_folder(folder, request.step, token)
        written = aside / saved.step_name(request.step)

        def publish() -> None:
            lists = {f"host {replica}": (aside / f"part_{replica}").read_text() for replica in request.replicas}
            sizes = {host: json.loads(text) for host, text in lists.items()}
            saved.publish(folder, request.step, token, sizes)

        if not held:
            await asyncio.to_thread(run_dirs.remove_tree, str(aside))
        try:
            if request.publish:
                await asyncio.to_thread(publish)
                return ""
            for files in held:
                if files is None:
                    return f"host {self._host.options.replica} has not kept it"
                await asyncio.to_thread(written.mkdir, parents=True, exist_ok=True)
                await files.copy_to(str(written))
                sizes = {file.path: file.size for file in await files.files}
                part = str(aside / f"part_{files.part.replica}")
                await asyncio.to_thread(safe_files.replace_file, part, json.dumps(sizes).encode())
        except (OSError, ValueError, PartError, saved.NotWholeError) as error:
            return str(error)
        return ""


def _target(path: str) -> str:
    """Return where a link leads; empty if it is none, or a rank has just renamed it."""
    with contextlib.suppress(OSError):
        return os.readlink(path)
    return ""


def _written(path: str, ranks: Iterable[int]) -> dict[int, Written]:
    """Return what those of the ranks say that are done."""
    written = {}
    for rank in ranks:
        with contextlib.suppress(FileNotFoundError):
            said = safe_files.read_json(os.path.join(path, f"rank_{rank}"))
            written[rank] = decode(Written, said, "what a rank says of its checkpoint")
    return written
