# SPDX-License-Identifier: BSD-3-Clause
"""Find the interpreter of a command's ranks on this host, if the command means another environment than the host's."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys
from collections.abc import Mapping

from torchx_monarch.command.command import Command, CommandError
from torchx_monarch.model.host_spec import HostSpec

_FIRST_LINE = re.compile(r"#!\s*(\S+)(?:\s+(?:-S\s+)?(\S+))?")


def with_interpreter(command: Command, options: HostSpec, environ: Mapping[str, str], cwd: str) -> Command:
    """Return a command with the interpreter that its torchrun or python means on this host.

    A torchrun with a folder means the interpreter of its first line. Without a folder, torchrun and python mean what
    PATH finds, if something before the command may have changed PATH, and the host's own interpreter otherwise.

    Raises:
        CommandError: torchrun's file does not tell its interpreter.
    """

    def find(word: str) -> str | None:
        found = word if os.sep in word or options.interpreter == "own" else shutil.which(word, path=environ.get("PATH"))
        return os.path.join(cwd, found) if found and os.sep in found else None

    flags = command.interpreter[1:]
    if command.interpreter:
        python = None if os.sep in command.interpreter[0] else find(command.interpreter[0])
    else:
        torchrun = find(command.torchrun)
        python = torchrun and _of_torchrun(torchrun, environ)
    if not python or _environment(python) == _environment(sys.executable):
        return command
    return dataclasses.replace(command, interpreter=(python, *flags))


def _of_torchrun(path: str, environ: Mapping[str, str]) -> str:
    """Return the interpreter of the first line of a torchrun, or the python beside a file in another language."""
    try:
        with open(path, errors="replace") as file:
            found = _FIRST_LINE.match(file.readline(4096))
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from None
    python = found[1] if found else ""
    if found and os.path.basename(python) == "env":
        python = shutil.which(found[2] or "", path=environ.get("PATH")) or ""
    if os.path.basename(python).startswith("python"):
        return python
    # Tools that switch between environments, and pip where a path is long, make scripts of a shell.
    beside = os.path.join(os.path.dirname(path), "python")
    if not os.access(beside, os.X_OK):
        raise CommandError(
            f"{path} is no Python script, so its interpreter is not known. Write `PYTHON -m torch.distributed.run` "
            "with the path of its Python interpreter"
        )
    return beside


def _environment(python: str) -> tuple[str, str]:
    return os.path.realpath(os.path.dirname(python)), os.path.realpath(python)
