# SPDX-License-Identifier: BSD-3-Clause
"""Learn on a host which modules a program imports (``-cfg preload=auto``), for the zygote of its next run."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from torchx_monarch.command.command import Program
from torchx_monarch.model.learned_modules import MAX_BYTES, LearnedFile, LearnedModules
from torchx_monarch.system import safe_files

_MOST_PROGRAMS = 50
"""Programs of which a live allocation keeps the modules; those that ran last."""


def program_key(program: Program, cwd: str) -> tuple[str, str]:
    """Return how a program is run, and its path, name or code: what is learned of one is not used for another."""
    return program.mode, os.path.join(cwd, program.target) if program.mode == "script" else program.target


class LearnedPreload:
    """Represent what this host has learned of one program.

    Attributes:
        modules: the modules.
        report: the file in which a rank reports what its program has imported.

    Args:
        report: the file.
        say: called with a progress line.
        stored: the file in which the modules are kept over jobs; None for none.
    """

    def __init__(self, report: str, say: Callable[[str], None], stored: LearnedFile | None = None) -> None:
        self.modules = stored.read() if stored is not None else LearnedModules()
        self.report = report
        self._say = say
        self._stored = stored
        self._environ: Mapping[str, str] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The modules to import ahead."""
        return self.modules.names

    def drop(self, name: str, why: str) -> None:
        """Leave out a module from now on."""
        if name in self.modules.dropped:
            return
        self._say(f"learned preload: {name} is not imported ahead any more: {why}")
        self.modules.drop(name, why)
        self._store()

    def collect(self) -> bool:
        """Take over and remove the report of a rank, if there is one; return whether a module is new."""
        reported = None
        with contextlib.suppress(OSError, ValueError):
            reported = safe_files.read_json(self.report, limit=MAX_BYTES)
        with contextlib.suppress(OSError):
            os.unlink(self.report)
        fields = reported if isinstance(reported, dict) else {}
        is_new = self.modules.learn(fields.get("modules"), fields.get("variables"))
        if is_new:
            self._store()
        return is_new

    def repeats(self, environ: Mapping[str, str]) -> bool:
        """Return whether the variables of a run are those of the run before it."""
        before, self._environ = self._environ, dict(environ)
        return before == environ

    def _store(self) -> None:
        if self._stored is None:
            return
        stored = self._stored.read()  # another host of this machine may have written it meanwhile
        for name, why in self.modules.dropped.items():
            stored.drop(name, why)
        stored.learn([*self.modules.names], [*self.modules.variables])
        try:
            self._stored.write(stored)
        except OSError as error:
            self._say(f"learned preload: cannot keep what was learned: {error.strerror}: {error.filename}")


class LearnedPrograms:
    """Keep what a live allocation has learned of its programs, and prepare the zygotes of their next runs.

    Args:
        report: the file in which ranks report; there is one run at a time.
        say: called with a progress line.
    """

    def __init__(self, report: str, say: Callable[[str], None]) -> None:
        self._report = report
        self._say = say
        self._programs: dict[tuple[str, str], LearnedPreload] = {}
        self._preparing: asyncio.Task[None] | None = None

    @property
    def is_preparing(self) -> bool:
        """Whether the zygote of a next run is importing its modules."""
        return self._preparing is not None and not self._preparing.done()

    def of(self, key: tuple[str, str]) -> LearnedPreload:
        """Return what has been learned of a program (``program_key``)."""
        found = self._programs.setdefault(key, LearnedPreload(self._report, self._say))
        self._programs[key] = self._programs.pop(key)
        for oldest in list(self._programs)[:-_MOST_PROGRAMS]:
            del self._programs[oldest]
        return found

    def prepare(self, step: Coroutine[Any, Any, None]) -> None:
        """Await, after what is being prepared, the import of modules ahead of a next run."""
        before = self._preparing

        async def prepare() -> None:
            if before is not None:
                await asyncio.wait([before])
            await step

        self._preparing = asyncio.ensure_future(prepare())
