# SPDX-License-Identifier: BSD-3-Clause
"""Start the processes of a run's ranks: as forks of the host's zygote, or as interpreters of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchx_monarch.host.ranks.learned_preload import LearnedPreload
from torchx_monarch.host.ranks.master_store import MasterEndpoint, MasterStore
from torchx_monarch.host.ranks.rank_process import RankProcess
from torchx_monarch.host.ranks.run_spec import RunSpec
from torchx_monarch.host.ranks.zygote import Zygote, ZygoteError, Zygotes
from torchx_monarch.model.world import LaunchError
from torchx_monarch.system import open_files

_TRIES = 3
"""How many zygotes are started for one order if something else ends them."""


class RankStarter:
    """Start the ranks of a run, and the TCPStore through which they meet.

    Its methods raise ``LaunchError`` if the ranks cannot be started; the message gives the reason.

    ``say`` is called with progress lines, ``on_first_output`` once, when a rank first prints; ``learned`` is what the
    host has learned of the program, None if nothing is learned.

    Attributes:
        store: the TCPStore, which is a fork of the zygote.
        count: number of ranks on this host; 0 before ``prepare``.
        imported: when the import of the modules began and ended, in seconds since the epoch; empty without one.
    """

    def __init__(
        self,
        run: RunSpec,
        zygotes: Zygotes,
        say: Callable[[str], None],
        on_first_output: Callable[[], None] | None = None,
        learned: LearnedPreload | None = None,
    ) -> None:
        self.store = MasterStore(say)
        self.count = 0
        self.imported: tuple[float, ...] = ()
        self._run = run if learned is None else dataclasses.replace(run, learned=())
        self._learned = learned
        self._zygotes = zygotes
        self._say = say
        self._on_first_output = on_first_output
        self._forks = run.forks
        self._is_lost = False
        """Whether a zygote has ended while it imported the modules: another would end as well."""

    @property
    def pids(self) -> list[int]:
        """Process ids of the zygotes and the store."""
        store = self.store.current
        return [*self._zygotes.pids, *([store.pid] if store is not None and store.pid else [])]

    async def prepare(self, nproc: str) -> int:
        """Start the zygote; return the number of ranks while it imports its modules.

        ``nproc`` is a number, or auto, cpu, gpu or xpu, which torch resolves.
        """
        if why := self._run.why_no_python():
            raise LaunchError(f"cannot start the Python interpreter {why}")
        # Unknown as yet, the zygote gets the environment of several ranks.
        self.count = int(nproc) if nproc.isdigit() else 2
        if self.count:
            self._choose()
            self._zygotes.fitting(self._run, self.count)
        if not nproc.isdigit():
            order = {"op": "count", "device": nproc}
            self.count = int(await self._ask_torch(order, f"--nproc-per-node={nproc} cannot be resolved on this host"))
            if self.count < 1:
                reason = f"--nproc-per-node={nproc} gives {self.count} ranks on this host; 1 or more are needed"
                raise LaunchError(reason)
            self._choose()
        if too_few := open_files.shortage(self.count):
            raise LaunchError(too_few)
        return self.count

    async def open_store(self, endpoint: MasterEndpoint) -> tuple[int, bool]:
        """Open the port where the ranks meet (see ``MasterStore.open``).

        Raises:
            EndpointError: the endpoint cannot be opened.
            LaunchError: a zygote cannot be started.
        """
        for _ in range(_TRIES):
            try:
                zygote = await self.importer()
                return await self.store.open(endpoint, zygote is not None and (await zygote.imports())["serves_store"])
            except ZygoteError as error:
                self._say(failure := f"{error}; another is started")
        raise LaunchError(failure)

    def new_process(self) -> RankProcess:
        """Return the process of a rank, which has pipes and has not begun.

        Raises:
            OSError: the pipes cannot be made.
        """
        return RankProcess(self._printed)

    async def start(self, ranks: Sequence[tuple[RankProcess, Mapping[str, Any]]]) -> None:
        """Start the processes of all ranks of an attempt, and that of the store whose port has been opened.

        By local rank, a description has what ``zygote_main`` says, but for ``python`` and ``cpus``.
        """
        more = [await self._cpus(local_rank) for local_rank in range(len(ranks))]
        if self._learned is not None and more:
            more[0]["report"] = self._learned.report
        for _ in range(_TRIES):
            importer = await self.importer()
            zygote = importer if importer is not None and self._forks else self._zygotes.bare(self._run, self.count)
            python = [] if zygote is importer else self._run.python()
            described = [
                (process, {**rank, **near, "python": [] if rank["mode"] == "exec" else python})
                for (process, rank), near in zip(ranks, more, strict=True)
            ]
            try:
                if not (failure := await self._fork(zygote, described, importer)):
                    return
                raise LaunchError(f"cannot start {failure}")
            except ZygoteError as error:
                self._say(failure := f"{error}; another is started")
                if any(process.pid for process, _ in ranks):
                    break  # some ranks run: their attempt cannot be started again
        raise LaunchError(failure)

    async def _fork(
        self, zygote: Zygote, ranks: Sequence[tuple[RankProcess, Mapping[str, Any]]], importer: Zygote | None
    ) -> str:
        """Fork the ranks and the store whose port is open, which only the importer can serve (see ``Zygote.fork``)."""
        current = self.store.current
        store = [(current, current.description)] if current is not None and not current.pid else []
        if zygote is importer or not store:
            # In one order: its middle process is one fork of torch's page tables less, 8 ms.
            return await zygote.fork([*store, *ranks])
        if importer is None:
            return "the ranks' TCPStore: the zygote that was to serve it has ended"
        return await importer.fork(store) or await zygote.fork(ranks)

    async def importer(self) -> Zygote | None:
        """Return the zygote that has imported the modules; None if there are none, or if importing them ends it."""
        while self._run.preload and not self._is_lost:
            zygote = self._zygotes.fitting(self._run, self.count)
            try:
                if await self._is_wrong(zygote):
                    # The modules before this one have been imported and checked; only this one is left out.
                    self._run = dataclasses.replace(self._run, learned=tuple(zygote.begun[:-1]))
                    continue
                unsafe = (await zygote.imports())["unsafe"]
            except ZygoteError as error:
                self._is_lost = True
                self._say(f"{error} while it imported {', '.join(self._run.preload)}; the ranks import for themselves")
                break
            if unsafe and self._forks:
                self._forks = False
                self._say(f"the ranks are not forks of one interpreter: {unsafe}")
            self.imported = zygote.imported
            return zygote
        return None

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

    def _printed(self) -> None:
        called, self._on_first_output = self._on_first_output, None
        if called is not None:
            called()

    # -- learned modules -----------------------------------------------------------------------------------------------

    async def prepare_next(self) -> None:
        """Have a zygote import all learned modules, for a next run of the program with the same variables.

        A module that must not be imported ahead is dropped, and another zygote imports the rest.
        """
        assert self._learned is not None
        while self._learned.modules.names:
            run = self._with_learned(self._learned)
            if self._zygotes.find(run, self.count) is not None:
                return
            try:
                zygote = self._zygotes.fitting(run, self.count)
                if await self._is_wrong(zygote):
                    continue
            except (LaunchError, ZygoteError):
                return  # the next run says what is wrong with its zygote
            if zygote.begun:
                names = ", ".join(sorted({name.partition(".")[0] for name in zygote.begun}))
                self._say(f"learned preload: imported ahead for the next run of the program: {names:.500}")
            return

    def _choose(self) -> None:
        """Choose the zygote with all learned modules, unless another one can start the ranks sooner."""
        if self._learned is None:
            return
        plain, ahead = dataclasses.replace(self._run, learned=()), self._with_learned(self._learned)
        ready, warm = self._zygotes.find(ahead, self.count), self._zygotes.find(plain, self.count)
        if ready is not None and ready.ready:
            # The user may have installed other packages since, or added files with the names of installed modules.
            if ahead.learned and ready.is_outdated(self._run.program_folder(self._run.command.program_of(0))):
                self._zygotes.discard(ready)
                ahead = plain
            self._run = ahead
        else:
            self._run = plain if warm is not None and warm.ready else ahead

    def _with_learned(self, learned: LearnedPreload) -> RunSpec:
        return dataclasses.replace(self._run, learned=learned.modules.names, variables=learned.modules.variables)

    async def _is_wrong(self, zygote: Zygote) -> bool:
        """Return whether a learned module must not be imported ahead: drop it then, and end the zygote.

        Raises:
            ZygoteError: the zygote has ended, or its host has ended it, and not because of a learned module.
        """
        try:
            why = (await zygote.imports()).get("wrong", "")
        except ZygoteError as error:
            if not zygote.begun or zygote.is_discarded:
                raise
            why = str(error)
        if not why or self._learned is None:
            return False
        self._learned.drop(zygote.begun[-1], why)
        self._zygotes.discard(zygote)
        return True
