# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The ranks of one run on a live allocation, started in spare interpreters that wait between runs."""

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
"""Prefixes of variables that an interpreter and its preloaded modules read before a run: a run that changes one of them
needs new interpreters."""


class SessionPool(RankPool):
    """Manage the ranks of one run on one host, and take over the spare interpreters of the previous run's pool.

    Args:
        command: command of the run.
        context: the host and the destinations of its ranks' output.
        environ: environment of the role.
        preload: modules that spare interpreters of a torchrun command import.
        on_first_output: called once, when a rank first prints.
        say: called with a progress line.
        cwd: folder in which the ranks start.
        added: environment variables that the run adds.
        previous: pool of the previous run, whose spare interpreters are used if they fit this command; None for none.
    """

    def __init__(
        self,
        command: Command,
        context: HostContext,
        environ: Mapping[str, str],
        preload: Sequence[str],
        on_first_output: Callable[[], None],
        say: Callable[[str], None],
        cwd: str,
        added: Mapping[str, str],
        previous: SessionPool | None = None,
    ) -> None:
        limits = previous.limits if previous is not None else None
        super().__init__(command, context, {**environ, **added}, preload, on_first_output, say, limits)
        self._host_environ = environ
        self._cwd = cwd
        self._added = dict(added)
        self._previous = previous
        self._spare_pool: SessionPool | None = None

    @property
    def warm(self) -> int:
        """Number of spare interpreters that have imported their preload modules."""
        return sum(one.ready for one in self._waiting)

    async def launch(self, world: World, spares: bool) -> list[int]:
        """Start the program of every rank (see ``RankPool``); always start spares, for the next run."""
        self._start_missing()
        for local_rank, interpreter in enumerate(self._waiting[: self._count]):
            self._bind(interpreter, local_rank)
        return await super().launch(world, True)

    async def serve_store(self, bind: str, advertised: str, hosts: int) -> tuple[str, int, bool]:
        """Open the port where the ranks meet (see ``RankPool``); end the store if the run has ended meanwhile."""
        found = await super().serve_store(bind, advertised, hosts)
        if self._retired:
            self._store.end()
        return found

    async def stop(self, number: int, grace: float) -> None:
        """Stop the ranks (see ``RankPool``); do nothing before they have been started."""
        if self._ranks:
            await super().stop(number, grace)

    def retire(self) -> SessionPool:
        """Close the pool at the end of its run and start spare interpreters for a next run of the same kind.

        Returns:
            the pool that has the spare interpreters: this one, or that of an earlier run if this one preloads nothing.
        """
        self.close()
        self._store.end()
        self._retired = True
        self._ranks = []  # breaks a cycle: a rank refers to the pool that started it, which refers to its ranks
        with contextlib.suppress(LaunchError):  # the next run that needs one reports the error
            for one in self._waiting if self._spare_pool is not None else ():
                one.kill(signal.SIGKILL)
            kept = self._spare_pool or self
            kept._waiting = [one for one in kept._waiting if not one.ended.is_set()]
            kept._start_missing()
            if kept is self and self._waiting:
                self._store.start_ahead(self._waiting[0])
        return self._spare_pool or self

    def _inherit(self) -> None:
        previous, self._previous = self._previous, None
        if previous is None:
            return
        previous._retired = True
        if previous._preload and not self._preload:
            self._spare_pool = previous  # starting an interpreter is cheap; importing its modules again is not
            return
        fitting = self._signature(0)
        for one in previous._waiting:
            if one.signature == fitting and not one.ended.is_set():
                self._waiting.append(one)
            else:
                one.kill(signal.SIGKILL)
        previous._waiting = []
        self._store.take_over(previous._store, keep=bool(self._waiting))

    def _signature(self, local_rank: int) -> object:
        """Return the value that two interpreters share if each can run this pool's program like a fresh one."""
        env = interpreter_environment(self._base_environ(), self._count)
        read = {name: value for name, value in env.items() if name.startswith(_READ_EARLY)}
        python = self._start_command(self._command.program_of(local_rank))
        return python, self._preload, read, self._start_folder()

    def _start_folder(self) -> str | None:
        """Return the run's folder if Python resolves a relative path at its start; None for the host's, for any run."""
        python, path = self._python()[0], self._environ.get("PYTHONPATH")
        relative = [] if not path else [entry for entry in path.split(os.pathsep) if not os.path.isabs(entry)]
        return self._cwd if relative or (os.sep in python and not os.path.isabs(python)) else None

    def _base_environ(self) -> Mapping[str, str]:
        """Return the environment with which interpreters start; ``_order`` adds the run's other variables later."""
        early = {name: value for name, value in self._added.items() if name.startswith(_READ_EARLY)}
        return {**self._host_environ, **early}

    def _spare_pids(self) -> list[int]:
        shelf = self._spare_pool
        return [*super()._spare_pids(), *((*shelf._spare_pids(), *shelf._store.pids) if shelf is not None else ())]

    def _label(self, program: Program) -> list[str]:
        return ["(waits for runs)"]

    def _prepare(self, interpreter: RankProcess, program: Program, local_rank: int) -> None:
        # The program and its folder are not known yet.
        interpreter.prepare("exec", "", self._preload)
        interpreter.signature = self._signature(local_rank)

    def _order(self, world: World, rank: Rank) -> dict[str, Any]:
        order = super()._order(world, rank)
        return {**order, "cwd": self._cwd, "env": {**self._added, **order["env"]}}
