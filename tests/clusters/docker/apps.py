# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Apps on monarch_docker, through TorchX's Runner here, and through its command in processes of their own."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tarfile
import textwrap
import time
from pathlib import Path
from typing import Any

from torchx.runner import Runner
from torchx.specs import AppDef, AppState, AppStatus, Resource, Role

from tests.clusters.docker.daemon import Daemon
from torchx_monarch.schedulers import monarch_docker

NAME = "monarch_docker"

TORCHX = [sys.executable, "-m", "torchx.cli.main"]


class Apps:
    """A Runner, and shorthands.

    Args:
        daemon: where they run.
        folder: where programs are written; every container sees it.
    """

    def __init__(self, daemon: Daemon, folder: Path) -> None:
        self.daemon = daemon
        self.folder = folder
        self.runner = Runner("torchx", {NAME: monarch_docker})
        self._handles: list[str] = []

    def program(self, text: str) -> str:
        """Writes a program; its path."""
        path = self.folder / "prog.py"
        path.write_text(textwrap.dedent(text))
        return str(path)

    def role(self, entrypoint: str, *args: str, name: str = "trainer", replicas: int = 1, **more: Any) -> Role:
        """A role that sees what is installed here."""
        return Role(
            name,
            image=self.daemon.image,
            entrypoint=entrypoint,
            args=list(args),
            num_replicas=replicas,
            mounts=self.daemon.mounts(self.folder),
            resource=more.pop("resource", Resource(cpu=-1, gpu=0, memMB=-1)),
            **more,
        )

    def torchrun(self, *words: str, nproc: int = 2, replicas: int = 2, **more: Any) -> Role:
        """A role of ranks."""
        shape = ("--nnodes", str(replicas), "--nproc-per-node", str(nproc), "--tee", "3")
        return self.role("torchrun", *shape, *words, replicas=replicas, **more)

    def run(self, *roles: Role, preload: str = "none", grace: int = 5, workspace: str | None = None, **cfg: Any) -> str:
        """Submits; the handle."""
        cfg = {"preload": preload, "grace": grace, **cfg}
        app = AppDef("app", list(roles), {"team": "a b"})
        handle: str = self.runner.run(app, NAME, cfg=cfg, workspace=workspace)
        return self.adopt(handle)

    def adopt(self, handle: str) -> str:
        """Deletes this app, too, in the end."""
        self._handles.append(handle)
        return handle

    def status(self, handle: str) -> AppStatus:
        status: AppStatus | None = self.runner.status(handle)
        assert status is not None
        return status

    def wait(self, handle: str, seconds: float = 60.0) -> AppStatus:
        """Its final status."""
        until = time.monotonic() + seconds
        while not (status := self.status(handle)).is_terminal():
            assert time.monotonic() < until, f"not over after {seconds:g} s: {status}"
            time.sleep(0.1)
        return status

    def states(self, handle: str) -> dict[str, AppState]:
        """The state of each replica, by ROLE/K."""
        return {f"{r.role}/{r.id}": r.state for role in self.status(handle).roles for r in role.replicas}

    def hostname(self, handle: str, replica: int, role: int = 0) -> str:
        """The name of a replica's container."""
        return str(self.status(handle).roles[role].replicas[replica].hostname)

    def lines(self, handle: str, k: int = 0, role: str = "trainer", **more: Any) -> list[str]:
        return list(self.runner.log_lines(handle, role, k, **more))

    def log(self, handle: str, role: str = "trainer", replicas: int = 2) -> str:
        """What all replicas of a role have said."""
        return "".join(line for k in range(replicas) for line in self.lines(handle, k, role))

    def files(self, handle: str, replica: int, folder: str) -> set[str]:
        """What lies in a folder of a container."""
        with contextlib.closing(self.daemon.client()) as client:
            chunks, _ = client.containers.get(self.hostname(handle, replica)).get_archive(folder)
            with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
                return {name.split("/")[1] for name in archive.getnames() if "/" in name}

    def torchx(self, *words: str) -> str:
        """What the command says, run by a process that knows nothing, elsewhere."""
        elsewhere = self.folder / "elsewhere"
        elsewhere.mkdir(exist_ok=True)
        # This channel of registration needs no installation of ours newer than this working tree.
        environ = {**os.environ, "TORCHX_PLUGINS_SOURCE": "1"}
        done = subprocess.run(
            [*TORCHX, *words], cwd=elsewhere, env=environ, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"torchx {' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def described(self, handle: str) -> AppDef:
        """The app as a Runner knows it that has not submitted it."""
        with Runner("torchx", {NAME: monarch_docker}) as runner:
            app: AppDef | None = runner.describe(handle)
        assert app is not None
        return app

    def close(self) -> None:
        """Deletes all of them."""
        for handle in self._handles:
            self.runner.delete(handle)
        self.runner.close()
