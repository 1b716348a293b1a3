# SPDX-License-Identifier: BSD-3-Clause
"""Learn on a host which modules a program imports (``-cfg preload=auto``), for the zygote of its next run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping

from torchx_monarch.command.command import Program
from torchx_monarch.model.learned_modules import LearnedModules


def program_key(program: Program, cwd: str) -> tuple[str, str]:
    """Return how a program is run, and its path, name or code: what is learned of one is not used for another."""
    return program.mode, os.path.join(cwd, program.target) if program.mode == "script" else program.target


class LearnedPreload:
    """Represent what this host has learned of one program.

    Attributes:
        modules: the modules.
        report: the file in which a rank reports what its program has imported.
    """

    def __init__(
        self, report: str, say: Callable[[str], None], path: str = "", modules: LearnedModules | None = None
    ) -> None:
        self.modules = modules or LearnedModules()
        self.report = report
        self._say = say
        self._path = path
        self._environ: Mapping[str, str] | None = None

    def drop(self, name: str, why: str) -> None:
        """Leave out a module, and those inside it, from now on."""
        if name not in self.modules.dropped:
            self._say(f"learned preload: {name} is not imported ahead any more: {why}")
            self.modules.learn(dropped={name: why})
            self._store()

    def collect(self) -> bool:
        """Take over and remove the report of a rank, if there is one; return whether a module is new."""
        reported = LearnedModules.read(self.report)
        with contextlib.suppress(OSError):
            os.unlink(self.report)
        if is_new := self.modules.learn(reported.names, reported.variables):
            self._store()
        return is_new

    def repeats(self, environ: Mapping[str, str]) -> bool:
        """Return whether the variables of a run are those of the run before it."""
        before, self._environ = self._environ, dict(environ)
        return before == environ

    def _store(self) -> None:
        if self._path:
            stored = LearnedModules.read(self._path)  # another host of this machine may have written it meanwhile
            self.modules.learn(stored.names, stored.variables, stored.dropped)
            try:
                self.modules.write(self._path)
            except OSError as error:
                self._say(f"learned preload: cannot keep what was learned: {error.strerror}: {error.filename}")
