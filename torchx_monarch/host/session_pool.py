# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The ranks of one run on a live allocation: interpreters that have waited for whatever comes, made ready for it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchx_monarch.command.command import Command, Program
from torchx_monarch.host.rank_environment import interpreter_environment
from torchx_monarch.host.rank_pool import HostContext, Rank, RankPool
from torchx_monarch.host.rank_process import RankProcess
from torchx_monarch.model.world import LaunchError, World

_READ_EARLY = (
    *("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "TORCH", "PYTORCH"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_"),
)
"""How the variables begin that an interpreter, or a module that it has imported, has read already: a run with other
values of these gets interpreters of its own."""


class SessionPool(RankPool):
    """Each run has its pool, and takes over from the pool before it.

    Args:
        command: what the run runs.
        place: who we are and where its output goes.
        environ: the environment of the role.
        preload: modules that interpreters of a torchrun command import ahead.
        on_first_output: called once, when a rank first prints.
        say: called with a line for a person.
        cwd: the folder that its ranks start in.
        added: the variables that the run adds.
        before: the pool of the run before. Interpreters that wait there and can run this command are used.
    """

    def __init__(
        self,
        command: Command,
        place: HostContext,
        environ: Mapping[str, str],
        preload: Sequence[str],
        on_first_output: Callable[[], None],
        say: Callable[[str], None],
        cwd: str,
        added: Mapping[str, str],
        before: SessionPool | None = None,
    ) -> None:
        limits = before.limits if before is not None else None
        super().__init__(command, place, {**environ, **added}, preload, on_first_output, say, limits)
        self._host_environ = environ
        self._cwd = cwd
        self._added = dict(added)
        self._before = before
        self._shelf: SessionPool | None = None

    @property
    def warm(self) -> int:
        """How many interpreters wait, with all imported that they were to import."""
        return sum(one.ready for one in self._waiting)

    async def launch(self, world: World, spares: bool) -> list[int]:
        """As above, and always with spares: for the next run."""
        self._start_missing()
        for local_rank, interpreter in enumerate(self._waiting[: self._count]):
            self._bind(interpreter, local_rank)
        return await super().launch(world, True)

    async def serve_store(self, bind: str, advertised: str, hosts: int) -> tuple[str, int, bool]:
        """As above; when the run has ended meanwhile, nobody needs it."""
        found = await super().serve_store(bind, advertised, hosts)
        if self._retired:
            self._store.end()
        return found

    async def stop(self, number: int, grace: float) -> None:
        """As above; before a run's ranks have been started there is nothing to stop."""
        if self._ranks:
            await super().stop(number, grace)

    def retire(self) -> SessionPool:
        """The run is over: end what is no rank, and have interpreters ready for another like it.

        Returns:
            the pool whose interpreters wait now: of an earlier run, where those of this one have nothing to import.
        """
        self.close()
        self._store.end()
        self._retired = True
        self._ranks = []  # they hold the pool that started them, and it its own
        with contextlib.suppress(LaunchError):  # it will be said when a run needs one
            for one in self._waiting if self._shelf is not None else ():
                one.kill(signal.SIGKILL)
            kept = self._shelf or self
            kept._waiting = [one for one in kept._waiting if not one.ended.is_set()]
            kept._start_missing()
            if kept is self and self._waiting:
                self._store.start_ahead(self._waiting[0])
        return self._shelf or self

    def _inherit(self) -> None:
        before, self._before = self._before, None
        if before is None:
            return
        before._retired = True
        if before._preload and not self._preload:
            self._shelf = before  # to start one costs nothing, and to import again does
            return
        fitting = self._signature(0)
        for one in before._waiting:
            if one.signature == fitting and not one.ended.is_set():
                self._waiting.append(one)
            else:
                one.kill(signal.SIGKILL)
        before._waiting = []
        self._store.take_over(before._store, keep=bool(self._waiting))

    def _signature(self, local_rank: int) -> object:
        """What an interpreter must have in common with those of this pool to run its program as a fresh one would."""
        env = interpreter_environment(self._base_environ(), self._count)
        read = {name: value for name, value in env.items() if name.startswith(_READ_EARLY)}
        python = self._starter(self._command.program_of(local_rank))
        return python, self._preload, read, self._start_folder()

    def _start_folder(self) -> str | None:
        """The run's folder, if Python resolves relative paths as it starts; the host's fits any run otherwise."""
        python, path = self._python()[0], self._environ.get("PYTHONPATH")
        relative = [] if not path else [entry for entry in path.split(os.pathsep) if not os.path.isabs(entry)]
        return self._cwd if relative or (os.sep in python and not os.path.isabs(python)) else None

    def _base_environ(self) -> Mapping[str, str]:
        """What an interpreter starts with: what this run adds and need not be there from the start comes later."""
        early = {name: value for name, value in self._added.items() if name.startswith(_READ_EARLY)}
        return {**self._host_environ, **early}

    def _kept(self) -> list[int]:
        shelf = self._shelf
        return [*super()._kept(), *((*shelf._kept(), *shelf._store.pids) if shelf is not None else ())]

    def _label(self, program: Program) -> list[str]:
        return ["(waits for runs)"]

    def _prepare(self, interpreter: RankProcess, program: Program, local_rank: int) -> None:
        # Which program it will run, and where, is not known yet.
        interpreter.prepare("exec", "", self._preload)
        interpreter.signature = self._signature(local_rank)

    def _order(self, world: World, rank: Rank) -> dict[str, Any]:
        order = super()._order(world, rank)
        return {**order, "cwd": self._cwd, "env": {**self._added, **order["env"]}}
