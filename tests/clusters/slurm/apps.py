# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Apps on a Slurm cluster, through TorchX's Runner and the scheduler as users have it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchx.runner import Runner
from torchx.specs import AppDef, AppState, AppStatus, Resource, Role

from torchx_monarch.backends.slurm import folder as folders
from torchx_monarch.backends.slurm import native
from torchx_monarch.backends.slurm.folder import JobFolder
from torchx_monarch.schedulers import monarch_slurm

NAME = "monarch_slurm"
SMALL = Resource(cpu=1, gpu=0, memMB=1024)

#: What a fresh process needs to ask about an app: ``runner`` and its ``handle``.
_PREAMBLE = """
import sys
from torchx.runner import Runner
from torchx_monarch.schedulers import monarch_slurm
runner = Runner("torchx", {"monarch_slurm": monarch_slurm})
handle = sys.argv[1]
"""


def spmd(script: Path, nodes: int = 2, nproc: int = 2, args: tuple[str, ...] = (), **more: Any) -> Role:
    """A role that runs a script with torchrun, as ``monarch.spmd`` writes it."""
    words = ["--nnodes", str(nodes), "--nproc-per-node", str(nproc), "--tee", "3", str(script), *args]
    role = Role("trainer", image="", entrypoint="torchrun", args=words, num_replicas=nodes, resource=SMALL, **more)
    return role


def sh(command: str, name: str = "r", replicas: int = 1, **more: Any) -> Role:
    """A role that runs a shell command."""
    args = ["-c", command]
    return Role(name, image="", entrypoint="sh", args=args, num_replicas=replicas, resource=SMALL, **more)


class Apps:
    """A Runner, and shorthands.

    Args:
        folder: for the scripts of the ranks.
    """

    def __init__(self, folder: Path) -> None:
        self.runner = Runner("torchx", {NAME: monarch_slurm})
        self._folder = folder
        self._handles: list[str] = []

    def script(self, text: str) -> Path:
        """A program of the ranks."""
        path = self._folder / f"prog{len(list(self._folder.glob('prog*')))}.py"
        path.write_text(textwrap.dedent(text))
        return path

    def run(self, *roles: Role, name: str = "app", workspace: str | None = None, **cfg: Any) -> str:
        """Submit an app whose ranks need no torch; its handle."""
        cfg = {"grace": 5, "preload": "none", **cfg}
        handle: str = self.runner.run(AppDef(name, list(roles), {"team": "a b"}), NAME, cfg=cfg, workspace=workspace)
        return self.adopt(handle)

    def adopt(self, handle: str) -> str:
        """Ends this app, too, in the end."""
        self._handles.append(handle)
        return handle

    def end(self) -> None:
        """End what still runs."""
        left = [handle.rpartition("/")[2] for handle in self._handles]
        for app_id in left:
            subprocess.run(["scancel", app_id], check=False, capture_output=True, timeout=240)
        until = time.monotonic() + 60
        running = ("RUNNING", "COMPLETING")
        while any(job.state in running for app_id in left for job in native.live_job(app_id)):
            assert time.monotonic() < until, "jobs do not end"
            time.sleep(0.1)

    def slurm_state(self, app_id: str) -> str:
        """Slurm's word; empty for a job that it has forgotten."""
        jobs = native.live_job(app_id)
        return jobs[0].state if jobs else ""

    def status(self, handle: str) -> AppStatus:
        status: AppStatus | None = self.runner.status(handle)
        assert status is not None
        return status

    def until(self, condition: Callable[[], object], what: str, handle: str, seconds: float = 60.0) -> None:
        """Poll until it holds."""
        until = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > until:
                raise AssertionError(f"still waiting for {what} after {seconds:g} s\n{self.everything(handle)}")
            time.sleep(0.1)

    def wait(self, handle: str, state: AppState, seconds: float = 60.0) -> AppStatus:
        """Its final status, which must be this state."""
        self.until(lambda: self.status(handle).is_terminal(), "the end", handle, seconds)
        status = self.status(handle)
        assert status.state is state, f"{status}\n{self.everything(handle)}"
        return status

    def wait_for_output(self, handle: str, text: str, replica: int = 0, role: str = "trainer", times: int = 1) -> None:
        self.until(lambda: self.log(handle, replica, role).count(text) >= times, repr(text), handle)

    def listed(self) -> list[tuple[str, AppState]]:
        """Names and states of this test's apps; those of others are this user's, too, as long as Slurm knows them."""
        listed = self.runner.list(NAME)
        return sorted((app.name, app.state) for app in listed if app.app_handle in self._handles)

    def log(self, handle: str, replica: int = 0, role: str = "trainer", **more: Any) -> str:
        return "".join(self.runner.log_lines(handle, role, replica, **more))

    def paths(self, handle: str) -> JobFolder:
        paths = folders.find(handle.rpartition("/")[2])
        assert paths is not None
        return paths

    def everything(self, handle: str) -> str:
        """All that the job has written, for the message of a failure."""
        root = Path(self.paths(handle).root)
        names = ("job.log", "job.json", "combined.log")
        files = [path for path in sorted(root.rglob("*")) if path.name in names or path.parent.name == "array"]
        files = [path for path in files if path.is_file()]
        return "\n".join(f"== {path}\n{path.read_text()}" for path in files)

    def fresh(self, handle: str, code: str) -> str:
        """Run code that has ``runner`` and ``handle`` in a fresh process and another folder; what it prints."""
        command = [sys.executable, "-c", _PREAMBLE + textwrap.dedent(code), handle]
        done = subprocess.run(command, capture_output=True, text=True, timeout=50, cwd="/", check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def kill_host(self, handle: str, replica: int) -> None:
        """SIGKILL the host process of a replica."""
        wanted = [b"--app", handle.rpartition("/")[2].encode(), b"--role", b"trainer", b"--replica", b"%d" % replica]
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if b"torchx_monarch.host" in words and words[3:9] == wanted:
                    found.append(int(entry.name))
        assert found, f"replica {replica} has no host process\n{self.everything(handle)}"
        os.kill(min(found), 9)  # the others are Monarch's, which go with it
