# SPDX-License-Identifier: BSD-3-Clause
"""What the ranks of a run execute on one host, and with which interpreters."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import sys
from collections.abc import Mapping, Sequence

from torchx_monarch.command.command import Command, Program
from torchx_monarch.host.ranks.preloaded_modules import is_read_at_import
from torchx_monarch.host.ranks.rank_environment import interpreter_environment

_READ_EARLY = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "TORCH", "PYTORCH", "NPY_", "NUMPY_")
"""Prefixes of variables that a zygote and its modules read before a run, beside those of ``is_read_at_import``: a run
that changes one of them needs another zygote."""


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """What the ranks of a run execute on this host.

    Attributes:
        command: command of the run.
        role_environ: environment of the role.
        modules: modules that the zygote of a torchrun command imports.
        added: environment variables that the run adds.
        cwd: folder in which the ranks start; None in a batch job, whose ranks start in the host's folder and whose
            zygote knows the program.
        forks: whether ranks are forks of the zygote, if it has modules; else they are interpreters of their own.
        learned: modules that the zygote imports after ``modules``, if they are installed ones that ranks can share
            (``learned_imports``); None if ranks are not to report what they import either.
        variables: variables that the program sets; a learned module that reads one must not be imported ahead.
    """

    command: Command
    role_environ: Mapping[str, str]
    modules: Sequence[str]
    added: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cwd: str | None = None
    forks: bool = True
    learned: Sequence[str] | None = None
    variables: Sequence[str] = ()

    @property
    def environ(self) -> Mapping[str, str]:
        """The environment of the role with the variables of the run."""
        return {**self.role_environ, **self.added} if self.added else self.role_environ

    @property
    def preload(self) -> list[str]:
        """The modules that the zygote imports; none for a program that is not Python or without torchrun."""
        is_python = self.command.kind == "torchrun" and self.command.program.mode != "exec"
        return list(self.modules) if is_python else []

    @property
    def nproc(self) -> str:
        """The number of ranks on this host, or auto, cpu, gpu or xpu, which torch resolves."""
        return self.command.options.nproc_per_node if self.command.kind == "torchrun" else "1"

    @property
    def presumed_count(self) -> int:
        """The number of ranks on this host that the environment of the zygote is for: of several if it is unknown."""
        return int(self.nproc) if self.nproc.isdigit() else 2

    def python(self) -> list[str]:
        """Return the interpreter of the run's programs and its flags."""
        typed = list(self.command.interpreter) or ["python"]
        if typed[0] in ("python", "python3"):
            # The host's own interpreter, as under torchrun; PATH may have another `python`, or none.
            typed[0] = sys.executable
        return [*typed, "-u"]

    def zygote_command(self, program: Program) -> list[str]:
        """Return the interpreter of the zygote: the program's, or a bare one if the zygote imports nothing."""
        options = self.command.options
        # Only torch can resolve the number of ranks and the CPUs, even if the program is not Python.
        asks_torch = options.numa_binding is not None or not options.nproc_per_node.isdigit()
        ahead = program.mode != "exec" and self.preload
        return self.python() if ahead or asks_torch else [sys.executable, "-I", "-S"]

    def program_folder(self, program: Program) -> str:
        """Return the folder that a Python program puts first in ``sys.path``; empty for other programs."""
        cwd = self.cwd or os.getcwd()
        if program.mode == "script":
            return os.path.dirname(os.path.realpath(os.path.join(cwd, program.target)))
        return "" if program.mode == "exec" else cwd

    def start_folder(self) -> str | None:
        """Return the folder in which the zygote starts; None for that of the host process.

        It is the run's folder if Python resolves a relative path at its start, else the host's, for any run.
        """
        if self.cwd is None:
            return None
        python, path = self.python()[0], self.environ.get("PYTHONPATH")
        relative = [] if not path else [entry for entry in path.split(os.pathsep) if not os.path.isabs(entry)]
        return self.cwd if relative or _is_relative(python) else None

    def start_environ(self, count: int) -> dict[str, str]:
        """Return the environment with which the zygote starts; ranks get the run's other variables later.

        Args:
            count: number of ranks on this host.
        """
        early = {name: value for name, value in self.added.items() if self._is_read_early(name)}
        return interpreter_environment({**self.role_environ, **early}, count)

    def why_no_python(self) -> str:
        """Return why the interpreter of the run's programs does not exist; empty if it may.

        A relative path is resolved later, in the program's folder.
        """
        python = self.python()[0]
        if self.command.program.mode == "exec" or _is_relative(python):
            return ""
        return "" if shutil.which(python, path=self.environ.get("PATH")) else f"{python!r}: {os.strerror(errno.ENOENT)}"

    def signature(self, count: int) -> object:
        """Return the value that two runs share if the zygote of one can start the ranks of the other.

        Args:
            count: number of ranks on this host.
        """
        environ, command = self.start_environ(count), self.zygote_command(self.command.program_of(0))
        read = {name: value for name, value in environ.items() if self._is_read_early(name)}
        learned = self.learned and (self.learned, self.variables)
        return command, self.preload, learned, read, self.start_folder()

    def _is_read_early(self, name: str) -> bool:
        """Return whether the zygote or its modules may read a variable. Modules other than torch may read any."""
        others = self.learned or set(self.preload) - {"torch"}
        return bool(others) or name.startswith(_READ_EARLY) or is_read_at_import(name)


def _is_relative(python: str) -> bool:
    return os.sep in python and not os.path.isabs(python)
