# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Apps on monarch_docker, through TorchX's Runner here, and through its command in processes of their own."""

from __future__ import annotations

import contextlib
import io
import tarfile
import time
from pathlib import Path
from typing import Any

from torchx.specs import AppDef, AppStatus, Resource, Role

from tests.clusters.apps import BaseApps
from tests.clusters.docker.daemon import Daemon
from torchx_monarch.schedulers import monarch_docker

NAME = "monarch_docker"


class Apps(BaseApps):
    """A Runner, and shorthands.

    Args:
        daemon: where they run.
        folder: where programs are written; every container sees it.
    """

    def __init__(self, daemon: Daemon, folder: Path) -> None:
        self.daemon = daemon
        super().__init__(folder, {NAME: monarch_docker})

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

    def run(
        self,
        *roles: Role,
        name: str = "app",
        preload: str = "none",
        grace: int = 5,
        workspace: str | None = None,
        **cfg: Any,
    ) -> str:
        """Submits; the handle."""
        cfg = {"preload": preload, "grace": grace, **cfg}
        app = AppDef(name, list(roles), {"team": "a b"})
        handle: str = self.runner.run(app, NAME, cfg=cfg, workspace=workspace)
        return self.adopt(handle)

    def wait(self, handle: str, seconds: float = 60.0) -> AppStatus:
        """Its final status."""
        until = time.monotonic() + seconds
        while not (status := self.status(handle)).is_terminal():
            assert time.monotonic() < until, f"not over after {seconds:g} s: {status}"
            time.sleep(0.1)
        return status

    def hostname(self, handle: str, replica: int, role: int = 0) -> str:
        """The name of a replica's container."""
        return str(self.status(handle).roles[role].replicas[replica].hostname)

    def files(self, handle: str, replica: int, folder: str) -> set[str]:
        """What lies in a folder of a container."""
        with contextlib.closing(self.daemon.client()) as client:
            chunks, _ = client.containers.get(self.hostname(handle, replica)).get_archive(folder)
            with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
                return {name.split("/")[1] for name in archive.getnames() if "/" in name}
