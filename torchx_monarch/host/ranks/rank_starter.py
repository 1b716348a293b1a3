# SPDX-License-Identifier: BSD-3-Clause
"""Start the processes of a run's ranks: as forks of the host's zygote, or as interpreters of their own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchx_monarch.host.ranks.master_store import MasterStore
from torchx_monarch.host.ranks.rank_process import Rank
from torchx_monarch.host.ranks.run_spec import RunSpec
from torchx_monarch.host.ranks.zygote import Zygote, ZygoteError, Zygotes
from torchx_monarch.model.world import LaunchError


class RankStarter:
    """Start the ranks of a run, and the TCPStore through which they meet.

    Its methods raise ``LaunchError`` if the ranks cannot be started; the message gives the reason.

    ``say`` is called with progress lines.

    Attributes:
        store: the TCPStore, which is a fork of the zygote.
        count: number of ranks on this host; 0 before ``prepare``.
        imported: when the import of the modules began and ended, in seconds since the epoch; empty without one.
        versions: of Python, torch and others, as the zygote has found them; empty without one.
        unshared: the first statement that the ranks do not share, and why; empty if that is not known.
    """

    def __init__(self, run: RunSpec, zygotes: Zygotes, say: Callable[[str], None]) -> None:
        self.store = MasterStore(say)
        self.count = 0
        self.imported: tuple[float, ...] = ()
        self.unshared = ""
        self.versions: dict[str, str] = {}
        self._run = run
        self._zygotes = zygotes
        self._say = say
        self._forks = run.forks
        self._is_lost = False
        """Whether a zygote has ended while it imported the modules: another would end as well."""

    async def prepare(self, nproc: str) -> int:
        """Start the zygote; return the number of ranks while it imports its modules.

        ``nproc`` is a number, or auto, cpu, gpu or xpu, which torch resolves.
        """
        if why := await asyncio.to_thread(self._run.why_no_python):
            raise LaunchError(f"cannot start the Python interpreter {why}")
        run = self._run
        if nproc.isdigit():
            self.count = int(nproc)
        else:
            # Meanwhile the zygote has the environment of several ranks, and executes nothing that may see their number.
            self.count, self._run = 2, run.without_leading()
            order = {"op": "count", "device": nproc}
            self.count = int(await self._ask_torch(order, f"--nproc-per-node={nproc} cannot be resolved on this host"))
            if self.count < 1:
                reason = f"--nproc-per-node={nproc} gives {self.count} ranks on this host; 1 or more are needed"
                raise LaunchError(reason)
            self._run = run
        if self.count:
            self._zygotes.fitting(run, self.count)
        return self.count

    async def start(self, ranks: Sequence[tuple[Rank, Mapping[str, Any]]]) -> None:
        """Start the processes of all ranks of an attempt, and that of the store whose port has been opened.

        By local rank, a description has what ``zygote_main`` says, but for ``python`` and ``cpus``.
        """
        more = [await self._cpus(local_rank) for local_rank in range(len(ranks))]
        importer = await self.importer()
        if importer is not None and self._forks:
            zygote = importer
        else:
            zygote = self._zygotes.fitting(dataclasses.replace(self._run, modules=(), leading=()), self.count)
        python = [] if zygote is importer else self._run.python()
        described = [
            (process, {**rank, **near, "python": [] if rank["mode"] == "exec" else python})
            for (process, rank), near in zip(ranks, more, strict=True)
        ]
        current = self.store.current
        store = [(current, {"store": current.address})] if current is not None and not current.pid else []
        if zygote is importer or not store:
            # In one order: its middle process is one fork of torch's page tables less, 8 ms.
            await zygote.fork([*store, *described])
            return
        if importer is None:  # which alone can serve the store
            raise LaunchError("cannot start the ranks' TCPStore: the zygote that was to serve it has ended")
        await importer.fork(store)
        await zygote.fork(described)

    async def importer(self) -> Zygote | None:
        """Return the zygote that has imported the modules; None if there are none, or if importing them ends it."""
        while self._run.preload and not self._is_lost:
            zygote = self._zygotes.fitting(self._run, self.count)
            try:
                answer = await zygote.imports()
            except ZygoteError as error:
                if self._run.leading:
                    zygote.close()
                    self._run = self._run.without_leading()
                    self._say(f"{error} while it executed the first imports of the program; the ranks execute them")
                    continue
                self._is_lost = True
                self._say(f"{error} while it imported {', '.join(self._run.preload)}; the ranks import for themselves")
                break
            if answer["unsafe"] and self._forks:
                self._forks = False
                self._say(f"the ranks are not forks of one interpreter: {answer['unsafe']}")
            self.imported, self.unshared = zygote.imported, answer.get("unshared", "") or self._run.leading_end
            self.versions = answer["versions"]
            return zygote
        return None

    async def renew_importer(self) -> None:
        """Replace the zygote if the program's leading statements, or what they have read, have changed since."""
        if self._run.leading:
            self._run = await asyncio.to_thread(self._run.with_leading)
        zygote = await self.importer()
        if zygote is not None:
            with contextlib.suppress(ZygoteError):  # its next order says so
                if not await zygote.is_current(await asyncio.to_thread(self._run.program_folder)):
                    zygote.close()
                    await self.importer()

    async def _cpus(self, local_rank: int) -> dict[str, Any]:
        mode = self._run.command.options.numa_binding
        if mode is None:
            return {}
        failure = f"--numa-binding={mode}: local rank {local_rank} has no CPUs near GPU {local_rank}"
        return {"cpus": await self._ask_torch({"op": "cpus", "mode": mode, "gpu": local_rank}, failure)}

    async def _ask_torch(self, order: Mapping[str, Any], failure: str) -> Any:
        """Have a zygote's fork ask torch; return the answer, whose name is that of the order."""
        try:
            zygote = await self.importer() or self._zygotes.fitting(self._run, self.count)
            answer = await zygote.ask(order)
        except ZygoteError as error:
            answer = {"error": str(error)}
        if "error" in answer:
            raise LaunchError(f"{failure}: {answer['error']}")
        return answer[order["op"]]
