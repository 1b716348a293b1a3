# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Start the interpreters of a host's ranks ahead of their programs: the one place where rank processes are started.

They are children of the host process, which exists before the mesh: so they import torch while the mesh forms.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Callable

from torchx_monarch.host.master_store import MasterStore
from torchx_monarch.host.rank_process import RankProcess
from torchx_monarch.host.run_spec import RunSpec, program_argv
from torchx_monarch.model.world import LaunchError
from torchx_monarch.system import open_files, processes


class Interpreters:
    """Start interpreters for the ranks of a run and keep spare ones for its next attempt, or for the next run.

    Attributes:
        store: the ranks' TCPStore, which is a fork of one of these interpreters.
        count: number of ranks on this host; 0 before ``prepare``.
        retired: whether another run has begun, or this one has ended.
        limits: limit of open files (None for that of this process) and umask of the ranks.

    Args:
        run: what the ranks execute.
        say: called with a progress line.
        on_first_output: called once, when a rank first prints; None for no call.
        previous: the interpreters of the previous run, which are used if they fit this one; None for none.
    """

    def __init__(
        self,
        run: RunSpec,
        say: Callable[[str], None],
        on_first_output: Callable[[], None] | None = None,
        previous: Interpreters | None = None,
    ) -> None:
        self.store = MasterStore(say)
        self.count = 0
        self.retired = False
        # Files of this process and of Monarch's processes are private to the user; ranks keep the user's umask.
        self.limits: tuple[tuple[int, int] | None, int] = (
            previous.limits if previous is not None else (processes.raise_file_limit(), os.umask(0o077))
        )
        self._spec = run
        self._on_first_output = on_first_output
        self._previous = previous
        self._kept: Interpreters | None = None  # those of an earlier run, kept for a later one
        self._waiting: list[RankProcess] = []

    @property
    def warm(self) -> int:
        """Number of spare interpreters that have imported their modules."""
        return sum(one.ready for one in self._waiting)

    @property
    def pids(self) -> list[int]:
        """Process ids of the spare interpreters and of the stores."""
        kept = self._kept.pids if self._kept is not None else []
        return [*(one.process.pid for one in self._waiting), *self.store.pids, *kept]

    async def prepare(self, nproc: str) -> int:
        """Start the interpreters of the first attempt; return the number of ranks while they import their modules.

        Args:
            nproc: a number, or auto, cpu, gpu or xpu, which torch resolves in the first interpreter.

        Raises:
            LaunchError: an interpreter cannot be started, torch rejects the name, or the open file limit is too low.
        """
        # Unknown as yet, the first interpreter gets the environment of several ranks.
        self.count = int(nproc) if nproc.isdigit() else 2
        self._inherit()
        if not nproc.isdigit():
            if not self._waiting:
                self._start(0)
            answer = await self._waiting[0].ask({"op": "count", "device": nproc}) or {"error": "the interpreter ended"}
            if "error" in answer:
                raise LaunchError(f"--nproc-per-node={nproc} cannot be resolved on this host: {answer['error']}")
            self.count = int(answer["count"])
            if self.count < 1:
                reason = f"--nproc-per-node={nproc} gives {self.count} ranks on this host; 1 or more are needed"
                raise LaunchError(reason)
        if too_few := open_files.shortage(self.count):
            raise LaunchError(too_few)
        self.start_missing()
        return self.count

    def start_missing(self) -> None:
        """Start the interpreters that an attempt lacks.

        Raises:
            LaunchError: one cannot be started.
        """
        for local_rank in range(len(self._waiting), self.count):
            self._start(local_rank)

    async def start_spares(self, wanted: Callable[[], bool]) -> None:
        """Start the interpreters of the next attempt one by one, then its store, for as long as they are wanted.

        One interpreter imports at a time: the ranks need the machine.
        """
        with contextlib.suppress(LaunchError):  # the attempt that needs one reports the error
            while wanted() and len(self._waiting) < self.count:
                self._start(len(self._waiting))
                await self._waiting[-1].ask({"op": "ready"})
        if wanted() and self._waiting:
            self.store.start_ahead(self._waiting[0])

    def server(self) -> RankProcess | None:
        """Return the interpreter that can serve the ranks' store; None if none imports torch."""
        return self._waiting[0] if self._spec.preload else None

    async def ready(self) -> list[RankProcess]:
        """Return an interpreter for each rank of an attempt, by local rank, bound to its CPUs.

        They count as spare until ``taken``.

        Raises:
            LaunchError: one cannot be started or bound.
        """
        self.start_missing()
        ready = self._waiting[: self.count]
        for local_rank, interpreter in enumerate(ready):
            if self._spec.cwd is not None:
                self._bind(interpreter, local_rank)
        for local_rank, interpreter in enumerate(ready):
            if why := await interpreter.binding_error():
                reason = f"local rank {local_rank} has no CPUs near GPU {local_rank}: {why}"
                raise LaunchError(f"--numa-binding={self._spec.command.options.numa_binding}: {reason}")
        return ready

    def taken(self) -> None:
        """Forget the interpreters that ``ready`` has returned: they are ranks now."""
        self._waiting = self._waiting[self.count :]

    def retire(self) -> Interpreters:
        """Start spare interpreters for a next run of the same kind, at the end of this one.

        Returns:
            the interpreters to keep: these, or those of an earlier run if this one preloads nothing.
        """
        self.retired = True
        self.store.end()
        kept = self._kept or self
        with contextlib.suppress(LaunchError):  # the next run that needs one reports the error
            if kept is not self:
                self._kill(self._waiting)
            kept._waiting = [one for one in kept._waiting if not one.ended.is_set()]
            kept.start_missing()
            if kept is self and self._waiting:
                self.store.start_ahead(self._waiting[0])
        return kept

    def _inherit(self) -> None:
        previous, self._previous = self._previous, None
        if previous is None:
            return
        previous.retired = True
        if previous._spec.preload and not self._spec.preload:
            self._kept = previous  # starting an interpreter is cheap; importing its modules again is not
            return
        fitting = self._spec.signature(self.count)
        fits = [one.signature == fitting and not one.ended.is_set() for one in previous._waiting]
        self._waiting = [one for one, use in zip(previous._waiting, fits, strict=True) if use]
        self._kill([one for one, use in zip(previous._waiting, fits, strict=True) if not use])
        previous._waiting = []
        self.store.take_over(previous.store, keep=bool(self._waiting))

    def _start(self, local_rank: int) -> None:
        run, program = self._spec, self._spec.command.program_of(local_rank)
        python = run.start_command(program)
        if (later := run.exec_command(program)) and not run.is_found(later[0]):
            raise LaunchError(f"cannot start the Python interpreter {later[0]!r}: {os.strerror(errno.ENOENT)}")
        # On an allocation the program and its folder are not known yet.
        known = run.cwd is None
        label = program_argv(program) if known else ["(waits for runs)"]
        env, folder = run.start_environ(self.count), run.start_folder()
        try:
            interpreter = RankProcess(python, label, env, *self.limits, folder, self._printed)
        except OSError as error:
            raise LaunchError(
                f"cannot start the Python interpreter {python[0]!r}: {error.strerror}{open_files.hint(error)}"
            ) from None
        mode, target = (program.mode, program.target) if known else ("exec", "")
        interpreter.prepare(mode, target, run.preload)
        if known:
            self._bind(interpreter, local_rank)
        else:
            interpreter.signature = run.signature(self.count)
        self._waiting.append(interpreter)

    def _bind(self, interpreter: RankProcess, local_rank: int) -> None:
        if self._spec.command.options.numa_binding is not None:
            interpreter.bind(self._spec.command.options.numa_binding, local_rank)

    def _printed(self) -> None:
        called, self._on_first_output = self._on_first_output, None
        if called is not None:
            called()

    @staticmethod
    def _kill(interpreters: list[RankProcess]) -> None:
        for one in interpreters:
            one.kill(signal.SIGKILL)
