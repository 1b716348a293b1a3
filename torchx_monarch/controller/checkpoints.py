# SPDX-License-Identifier: BSD-3-Clause
"""Which checkpoints in the memory of the hosts are whole, where they are copied to, and with which an attempt begins.

Each host reports the parts that it has; ``Members`` has the last report of each. A checkpoint is whole when the parts
of all ranks that take part are there, of one attempt. Two whole ones stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time

from torchx_monarch.controller.host_messages import (
    CheckpointPart,
    CheckpointParts,
    HostError,
    KeepCheckpoints,
    ListCheckpoints,
    PartSource,
    PersistCheckpoint,
    RestoreCheckpoint,
)
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.controller.members import Member
from torchx_monarch.model.world import World

_WHOLE = 2

_TIMEOUT = 600.0
"""Seconds for hosts to bring the parts that they lack, before ranks start."""

_LAST_TIMEOUT = 300.0
"""Seconds for the last copy at the end of a job; what ends the hosts may leave less."""


@dataclasses.dataclass(frozen=True)
class _HeldPart:
    """A part, and the hosts that have it."""

    part: CheckpointPart
    holders: list[Member]

    def source(self, is_needed: bool = True) -> PartSource:
        """Return where the hosts fetch the part, first from the host that has written it."""
        holders = sorted(self.holders, key=lambda member: member.host.replica != self.part.replica)
        addresses = (member.checkpoints.address for member in holders if member.is_registered)
        return PartSource(self.part, tuple(filter(None, addresses)), is_needed)


@dataclasses.dataclass(frozen=True)
class _Checkpoint:
    """A checkpoint: its parts, by the replicas that have written them."""

    parts: dict[int, _HeldPart]

    @property
    def first(self) -> CheckpointPart:
        """One of the parts, for what they have in common."""
        return next(iter(self.parts.values())).part

    @property
    def is_whole(self) -> bool:
        found = {rank for held in self.parts.values() for rank in held.part.ranks}
        return found >= {*(self.first.all_ranks or range(self.first.world))}

    @property
    def key(self) -> tuple[int, int]:
        """Its step and attempt."""
        return self.first.step, self.first.attempt


class Checkpoints:
    """Follow the checkpoints of one run."""

    def __init__(self, hosts: JobHosts) -> None:
        self._hosts = hosts
        self._members = hosts.members
        self._reporter = hosts.reporter
        self._changed = asyncio.Event()
        self._persisted = -1
        self._recorded = 0
        self._last_persist = float("-inf")  # the first at once: a job of one host has no copy elsewhere
        self._persisting: tuple[tuple[int, int], asyncio.Task[None]] | None = None
        for member in self._members:
            member.checkpoints = CheckpointParts((), "")  # of the run before
        self._members.on_checkpoints = self._changed.set

    def _whole(self) -> list[_Checkpoint]:
        """Return the whole checkpoints of the hosts of the attempt, those of the last attempt first, by their steps."""
        found: dict[tuple[int, int], _Checkpoint] = {}
        for member in self._members.present:
            for part in member.checkpoints.parts:
                parts = found.setdefault((part.attempt, part.step), _Checkpoint({})).parts
                parts.setdefault(part.replica, _HeldPart(part, [])).holders.append(member)
        return [found[key] for key in sorted(found, reverse=True) if found[key].is_whole]

    # -- while ranks run -----------------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Copy each whole checkpoint, or the newest after a longer copy, to the next host, and now and then to disk."""
        kept: tuple[int, int] | None = None
        self._changed.set()  # the next host may be another one than in the attempt before
        took, clock = 0.0, time.monotonic
        while True:
            await asyncio.sleep(10 * took)  # each of thousands of hosts reports
            await self._changed.wait()
            self._changed.clear()
            began = clock()
            whole = self._whole()
            took = clock() - began
            if not whole or whole[0].key == kept:
                continue
            keep = {checkpoint.key for checkpoint in whole[:_WHOLE]}
            with contextlib.suppress(HostError):  # the loss of a host is an event
                kept = whole[0].key
                await self._keep(whole[0], (*keep, *self._in_use()))
                self._record_memory()
            # Hosts may have had later ones already, and not these any more.
            due = next((checkpoint for checkpoint in self._whole() if checkpoint.key in keep), None)
            if due and not self._in_use() and time.monotonic() > self._last_persist + due.first.persist_every:
                self._persisting = due.key, asyncio.ensure_future(self._persist(due))

    def _record_memory(self) -> None:
        """Report how much memory checkpoints take of a host, if it is a tenth more than at the last time."""
        sizes = [sum(part.size for part in member.checkpoints.parts) for member in self._members.present]
        size = max(sizes, default=0)
        if size > 1.1 * self._recorded:
            self._recorded = size
            self._reporter.record("checkpoint_memory", f"checkpoints take {size} bytes of a host's memory", bytes=size)

    def _in_use(self) -> list[tuple[int, int]]:
        """Return the checkpoint that is being copied to where its ranks have said, if one is."""
        return [self._persisting[0]] if self._persisting and not self._persisting[1].done() else []

    async def _keep(self, checkpoint: _Checkpoint, whole: tuple[tuple[int, int], ...]) -> None:
        ring = list(self._members.attempt.hosts)
        keeping = []
        for place, replica in enumerate(ring):
            before = checkpoint.parts.get(ring[place - 1]) if len(ring) > 1 else None
            copy = before.source() if before is not None else None
            keeping.append(self._hosts.ask_host(KeepCheckpoints(whole, copy), replica))
        await asyncio.gather(*keeping)

    # -- persist -------------------------------------------------------------------------------------------------------

    async def finish(self) -> None:
        """Copy the newest whole checkpoint to where its ranks have said, unless that has been done."""
        if not self._is_used:
            return
        await self._list()
        if self._persisting is not None:
            await asyncio.wait([self._persisting[1]], timeout=_LAST_TIMEOUT)
        for checkpoint in self._whole()[:1]:
            persisting = self._persist(checkpoint, _LAST_TIMEOUT)
            await self._reporter.while_waiting(persisting, lambda: "the last checkpoint to be copied")

    async def _persist(self, checkpoint: _Checkpoint, timeout: float | None = None) -> None:
        step, folder = checkpoint.first.step, checkpoint.first.persist
        if not folder or step == self._persisted:
            return
        self._last_persist = time.monotonic()
        try:
            why = await asyncio.wait_for(self._copy(checkpoint, folder), timeout)
        except asyncio.TimeoutError:
            why = f"the hosts have not copied it within {timeout:g} s"
        if why:
            text = f"the checkpoint of step {step} is not in {folder}: {why}"
            self._reporter.report("persist_failed", text, step=step, path=folder)
        else:
            self._persisted = step
            self._reporter.report("checkpoint", f"the checkpoint of step {step} is in {folder}", step=step, path=folder)

    async def _copy(self, checkpoint: _Checkpoint, folder: str) -> str:
        """Copy a checkpoint to a folder; return why it is not there, or empty."""
        step, attempt = checkpoint.key
        by_holder: dict[int, list[int]] = {}
        for replica, held in checkpoint.parts.items():
            by_holder.setdefault(held.holders[0].host.replica, []).append(replica)
        asking = [
            self._hosts.ask_host(PersistCheckpoint(step, attempt, tuple(replicas), folder), holder)
            for holder, replicas in by_holder.items()
        ]
        answers = await asyncio.gather(*asking, return_exceptions=True)  # so that none copies any more
        why = next((str(answer) for answer in answers if answer), "")
        try:
            if not why:
                publish = PersistCheckpoint(step, attempt, tuple(checkpoint.parts), folder, publish=True)
                why = await self._hosts.ask_host(publish, next(iter(by_holder)))
        except HostError as error:
            why = str(error)
        if why:
            with contextlib.suppress(HostError):
                await self._hosts.ask_host(PersistCheckpoint(step, attempt, (), folder), next(iter(by_holder)))
        return why

    # -- restarts ------------------------------------------------------------------------------------------------------

    async def restore(self, world: World) -> None:
        """Have the ranks of the next attempt begin with the newest whole checkpoint that can be used."""
        await self._list()
        if not self._is_used:
            return
        for checkpoint in self._whole():
            asking = [self._restore(checkpoint, world, replica) for replica in self._members.attempt.hosts]
            if not (why := next(filter(None, await asyncio.gather(*asking)), "")):
                self._report(checkpoint, world)
                return
            self._reporter.line(f"the checkpoint of step {checkpoint.key[0]} in memory cannot be used: {why}")
        await self._hosts.ask(RestoreCheckpoint(()), _TIMEOUT)
        self._reporter.line("no whole checkpoint is in memory: the ranks begin with one on disk, or from the start")

    async def _restore(self, checkpoint: _Checkpoint, world: World, replica: int) -> str:
        own = {*world.place(replica).ranks}
        sources = []
        for held in checkpoint.parts.values():
            is_needed = not own.isdisjoint(held.part.ranks) or held.part.world != world.size
            if is_needed or held.part.shared:
                sources.append(held.source(is_needed))
        sources.sort(key=lambda source: source.part.replica != replica)
        return await self._hosts.ask_host(RestoreCheckpoint(tuple(sources)), replica, _TIMEOUT)

    def _report(self, checkpoint: _Checkpoint, world: World) -> None:
        copied = [
            f"host {replica}'s part from host {held.holders[0].host.replica}"
            for replica, held in checkpoint.parts.items()
            if all(member.host.replica != replica for member in held.holders)
        ]
        more = f" ({', '.join(copied)})" if copied else ""
        text = f"the ranks begin with the checkpoint of step {checkpoint.key[0]} in memory{more}"
        self._reporter.report("resumed", text, step=checkpoint.key[0], attempt=world.attempt)

    async def _list(self) -> None:
        answers, _ = await self._hosts.collect(ListCheckpoints(), _TIMEOUT)
        for replica, parts in answers.items():
            self._members.set_checkpoints(replica, parts)

    @property
    def _is_used(self) -> bool:
        return any(member.checkpoints.parts for member in self._members.present)
