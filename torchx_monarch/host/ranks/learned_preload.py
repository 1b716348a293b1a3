# SPDX-License-Identifier: BSD-3-Clause
"""Learn on a host which modules a program imports, for the zygote of its next attempt or run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from torchx_monarch.command.command import Program
from torchx_monarch.model.learned_modules import LearnedModules, read_report


def program_key(program: Program, cwd: str) -> tuple[str, str]:
    """Return how a program is run, and its path, name or code: what is learned of one is not used for another."""
    return program.mode, os.path.join(cwd, program.target) if program.mode == "script" else program.target


class LearnedPreload:
    """Represent what this host has learned of one program.

    Attributes:
        modules: the modules.
        report: the file in which ranks report what the program imports.
        environ: the variables that the run before has added; None before the first one.
    """

    def __init__(
        self, report: str, say: Callable[[str], None], path: str = "", modules: LearnedModules | None = None
    ) -> None:
        self.modules = modules or LearnedModules()
        self.report = report
        self._say = say
        self._path = path
        self.environ: Mapping[str, str] | None = None
        self._differed = set[str]()

    def drop(self, wrong: Mapping[str, str]) -> None:
        """Leave out modules, and those inside them, from now on."""
        for name, why in wrong.items():
            if name not in self.modules.dropped:
                self._say(f"learned preload: {name} is not imported ahead any more: {why}")
        self.modules.learn(dropped=wrong)
        self._store()

    def collect(self) -> bool:
        """Take over what ranks have reported, if anything; return whether anything is new.

        If the program was in another state than before, all is learned anew; if that happens again at the same module,
        that and all that it imports afterwards are dropped: the state differs between ranks, or from run to run.
        """
        reported = read_report(self.report)
        for learned in reported:
            if learned.differs and learned.name not in self._differed:
                self._differed.add(learned.name)
                self.modules.imports = ()
                return False
            if learned.differs:
                names = self.modules.names
                later = names[names.index(learned.name) :] if learned.name in names else [learned.name]
                self.drop(dict.fromkeys(later, learned.differs))
        if is_new := self.modules.learn(reported):
            self._store()
        return is_new

    def _store(self) -> None:
        if self._path:
            stored = LearnedModules.read(self._path)  # another host of this machine may have written it meanwhile
            self.modules.learn(dropped=stored.dropped)
            self.modules.learn([*stored.imports, *self.modules.imports])
            try:
                self.modules.write(self._path)
            except OSError as error:
                self._say(f"learned preload: cannot keep what was learned: {error.strerror}: {error.filename}")
