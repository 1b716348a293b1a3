# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the tests of all backends with images do with apps: by TorchX's Runner here, and by its command elsewhere."""

from __future__ import annotations

import abc
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchx.runner import Runner
from torchx.specs import AppDef, AppState, AppStatus, Role

# Errors for a person come without a traceback where the command is called so.
TORCHX = [sys.executable, "-c", "import sys; sys.argv[0] = 'torchx'; from torchx.cli.main import main; main()"]


class BaseApps(abc.ABC):
    """A Runner, and shorthands.

    Args:
        folder: where programs are written; every replica sees it.
        schedulers: the factories that are tested.

    Attributes:
        patience: by how much longer things may take than on a cluster of the tests' own.
    """

    patience = 1.0

    def __init__(self, folder: Path, schedulers: Mapping[str, Callable[..., Any]]) -> None:
        self.folder = folder
        self._schedulers = dict(schedulers)
        self.runner = Runner("torchx", self._schedulers)
        self._handles: list[str] = []

    def program(self, text: str) -> str:
        """Writes a program; its path."""
        path = self.folder / "prog.py"
        path.write_text(textwrap.dedent(text))
        return str(path)

    @abc.abstractmethod
    def role(self, entrypoint: str, *args: str, name: str = "trainer", replicas: int = 1, **more: Any) -> Role:
        """A role that sees the folder."""

    def torchrun(self, *words: str, nproc: int = 2, replicas: int = 2, **more: Any) -> Role:
        """A role of ranks."""
        shape = ("--nnodes", str(replicas), "--nproc-per-node", str(nproc), "--tee", "3")
        return self.role("torchrun", *shape, *words, replicas=replicas, **more)

    def adopt(self, handle: str) -> str:
        """Deletes this app, too, in the end."""
        self._handles.append(handle)
        return handle

    def status(self, handle: str) -> AppStatus:
        status: AppStatus | None = self.runner.status(handle)
        assert status is not None
        return status

    def states(self, handle: str) -> dict[str, AppState]:
        """The state of each replica, by ROLE/K."""
        return {f"{r.role}/{r.id}": r.state for role in self.status(handle).roles for r in role.replicas}

    def lines(self, handle: str, k: int = 0, role: str = "trainer", **more: Any) -> list[str]:
        return list(self.runner.log_lines(handle, role, k, **more))

    def log(self, handle: str, role: str = "trainer", replicas: int = 2) -> str:
        """What all replicas of a role have said."""
        return "".join(line for k in range(replicas) for line in self.lines(handle, k, role))

    def torchx(self, *words: str, code: int = 0, **environ: str) -> str:
        """What the command says, run by a process that knows nothing, elsewhere; its errors too where it is to fail."""
        elsewhere = self.folder / "elsewhere"
        elsewhere.mkdir(exist_ok=True)
        # This channel of registration needs no installation of ours newer than this working tree.
        env = {**os.environ, "TORCHX_PLUGINS_SOURCE": "1", **environ}
        timeout = 240 * self.patience
        done = subprocess.run(
            [*TORCHX, *words], cwd=elsewhere, env=env, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == code, f"torchx {' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout + (done.stderr if code else "")

    def described(self, handle: str) -> AppDef:
        """The app as a Runner knows it that has not submitted it."""
        with Runner("torchx", self._schedulers) as runner:
            app: AppDef | None = runner.describe(handle)
        assert app is not None
        return app

    def close(self) -> None:
        """Deletes all of them."""
        for handle in self._handles:
            self.runner.delete(handle)
        self.runner.close()
