# SPDX-License-Identifier: BSD-3-Clause
"""Completion of ``torchx monarch`` in real shells."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.local.terminal import Terminal
from tests.waits import until
from torchx_monarch.backends.core import state_files

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


@contextlib.contextmanager
def shell(name: str, folder: Path) -> Iterator[Terminal]:
    command, setup = _SHELLS[name]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    started = Terminal(command, folder, {"TERM": "xterm", "HOME": str(folder), "PATH": path})
    started.type(f'{setup}; echo set"" up\n')
    try:
        yield started
    finally:
        started.kill()


def clear(typed: Terminal) -> None:
    """Remove what is typed but not entered, and forget what is on the screen."""
    typed.type("\x15")
    time.sleep(0.1)
    typed.forget()


@pytest.mark.filterwarnings("ignore:.*forkpty.*:DeprecationWarning")
@pytest.mark.parametrize("name", _SHELLS)
def test_commands_options_and_handles_are_completed(name: str, tmp_path: Path) -> None:
    if shutil.which(name) is None and "CI" not in os.environ:
        pytest.skip(f"there is no {name} here")
    paths = state_files.app_paths("digits-c2jz0w1r")
    Path(paths.root).mkdir(parents=True)
    Path(paths.status).touch()
    with shell(name, tmp_path) as typed:
        until(lambda: typed.shows("set up"), "the shell")
        for before, after in [
            ("torchx monarch stat\t", "torchx monarch status"),
            ("torchx monarch logs --time\t", "--timestamps"),
            ("torchx monarch status dig\t", "digits-c2jz0w1r"),
            ("torchx monarch exec --detach digits-\t", "digits-c2jz0w1r"),
        ]:
            clear(typed)
            typed.type(before)
            until(lambda wanted=after: typed.shows(wanted), f"{after!r} after {before!r}")
