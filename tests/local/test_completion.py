# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Completion of ``torchx monarch`` in real shells."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torchx_monarch.backends.core import state_files

Eventually = Callable[..., object]

_SHELLS = {
    "bash": (["bash", "--norc", "-i"], 'PS1="ready> "; eval "$(torchx monarch completion bash)"'),
    "zsh": (
        ["zsh", "-f", "-i"],
        'PS1="ready> "; autoload -Uz compinit; compinit -u -D; eval "$(torchx monarch completion zsh)"',
    ),
    "fish": (
        ["fish", "--no-config", "-i"],
        'function fish_prompt; echo "ready> "; end; torchx monarch completion fish | source',
    ),
}
"""The command of each shell, and what its user types or writes into its start-up file."""

_CONTROL = re.compile(r"\x1b\][^\x07]*\x07|\x1b[\[(][0-9;?]*[A-Za-z]|[\x07\x0e\x0f]|\x1b[=>]")


class Shell:
    """An interactive shell in a terminal of its own."""

    def __init__(self, name: str, folder: Path) -> None:
        command, setup = _SHELLS[name]
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.environ.update(
                TERM="xterm", HOME=str(folder), PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            )
            os.execvp(command[0], command)
        os.set_blocking(self._fd, False)
        self._text = ""
        self.type(f'{setup}; echo set"" up\n')

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def shows(self, words: str) -> bool:
        while True:
            try:
                data = os.read(self._fd, 65536)
            except OSError:  # nothing yet, or the end
                break
            if not data:
                break
            self._text += data.decode(errors="replace")
        return words in _CONTROL.sub("", self._text)

    def forget(self) -> None:
        """Forget what is on the screen, and what is typed but not entered."""
        self.type("\x15")
        time.sleep(0.1)
        self.shows("")
        self._text = ""


@contextlib.contextmanager
def shell(name: str, folder: Path) -> Iterator[Shell]:
    started = Shell(name, folder)
    try:
        yield started
    finally:
        os.kill(started.pid, signal.SIGKILL)
        os.waitpid(started.pid, 0)


@pytest.mark.filterwarnings("ignore:.*forkpty.*:DeprecationWarning")
@pytest.mark.parametrize("name", _SHELLS)
def test_commands_options_and_handles_are_completed(name: str, tmp_path: Path, eventually: Eventually) -> None:
    if shutil.which(name) is None and "CI" not in os.environ:
        pytest.skip(f"there is no {name} here")
    Path(state_files.app_paths("digits-c2jz0w1r").root).mkdir(parents=True)
    with shell(name, tmp_path) as typed:
        eventually(lambda: typed.shows("set up"), "the shell")
        for before, after in [
            ("torchx monarch stat\t", "torchx monarch status"),
            ("torchx monarch logs --time\t", "--timestamps"),
            ("torchx monarch status dig\t", "digits-c2jz0w1r"),
            ("torchx monarch exec --detach digits-\t", "digits-c2jz0w1r"),
        ]:
            typed.forget()
            typed.type(before)
            eventually(lambda wanted=after: typed.shows(wanted), f"{after!r} after {before!r}")
