# SPDX-License-Identifier: BSD-3-Clause
"""Apps on the detached local scheduler, through TorchX's Runner, as any program would use it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from torchx.runner import Runner
from torchx.specs import AppDef, AppState, AppStatus, Role

from tests.waits import WITHIN
from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.local import folder
from torchx_monarch.schedulers import monarch_local
from torchx_monarch.schedulers.monarch import MonarchScheduler
from torchx_monarch.system import processes

NAME = "monarch_local"

#: What a fresh process needs to ask about an app: ``runner``, ``handle(app_id)``.
_PREAMBLE = """
import json, sys
from torchx.runner import Runner
from torchx_monarch.schedulers import monarch_local
runner = Runner("torchx", {"monarch_local": monarch_local})
handle = lambda app_id: f"monarch_local://torchx/{app_id}"
"""


def sh(command: str, name: str = "r", replicas: int = 1, *, wrap: bool = False, **more: Any) -> Role:
    """A role that runs a shell command; by default as it is, because a host would do what the supervisor is to do."""
    more["metadata"] = {"monarch": {"wrap": wrap, **more.get("metadata", {}).get("monarch", {})}}
    return Role(name, image="", entrypoint="sh", args=["-c", command], num_replicas=replicas, **more)


def py(code: str, *args: str, name: str = "r", replicas: int = 1, **more: Any) -> Role:
    """A role that runs Python code as it is."""
    more["metadata"] = {"monarch": {"wrap": False, **more.get("metadata", {}).get("monarch", {})}}
    words = ["-c", code, *args]
    return Role(name, image="", entrypoint=sys.executable, args=words, num_replicas=replicas, **more)


class Detached:
    """A Runner, and shorthands."""

    def __init__(self) -> None:
        self.runner = Runner("torchx", {NAME: monarch_local})

    @property
    def scheduler(self) -> MonarchScheduler:
        scheduler: MonarchScheduler = self.runner._scheduler(NAME)
        return scheduler

    def run(self, *roles: Role, name: str = "app", grace: int = 5, **cfg: Any) -> str:
        handle: str = self.runner.run(AppDef(name, list(roles), {"team": "a b"}), NAME, cfg={"grace": grace, **cfg})
        return handle.rpartition("/")[2]

    def handle(self, app_id: str) -> str:
        return f"{NAME}://torchx/{app_id}"

    def status(self, app_id: str) -> AppStatus:
        status: AppStatus | None = self.runner.status(self.handle(app_id))
        assert status is not None
        return status

    def wait(self, app_id: str, seconds: float = WITHIN) -> AppStatus:
        """Its final status."""
        assert self.scheduler.apps.wait(app_id, seconds), f"still running: {self.status(app_id)}"
        return self.status(app_id)

    def states(self, app_id: str) -> dict[str, AppState]:
        """The state of each replica, by ROLE/K."""
        return {f"{r.role}/{r.id}": r.state for role in self.status(app_id).roles for r in role.replicas}

    def log(self, app_id: str, role: str = "r", k: int = 0, **more: Any) -> list[str]:
        return list(self.runner.log_lines(self.handle(app_id), role, k, **more))

    def paths(self, app_id: str) -> state_files.AppPaths:
        return state_files.app_paths(app_id)

    def owner(self, app_id: str) -> folder.Owner:
        owner = folder.load_owner(self.paths(app_id))
        assert owner is not None
        return owner

    def host(self, app_id: str, replica: int) -> int:
        """Return the pid of a replica's host."""
        for child in psutil.Process(self.owner(app_id).supervisor.pid).children():
            words = child.cmdline()
            if words[words.index("--replica") + 1] == str(replica):
                return child.pid
        raise LookupError(replica)

    def record(self, app_id: str) -> dict[str, Any]:
        """The status file."""
        record = state_files.load_undamaged(dict, self.paths(app_id).status)
        assert record is not None
        return record

    def events(self, app_id: str) -> list[dict[str, Any]]:
        from torchx_monarch.insight import events

        return events.read(self.paths(app_id).events)[0]

    def fresh(self, code: str, **more: Any) -> Any:
        """Run code in a fresh process; what it prints, read as JSON."""
        return json.loads(fresh(code, **more))


def fresh(code: str, wrapper: Sequence[str] = (), **more: Any) -> str:
    """Run code that has ``runner`` and ``handle`` in a fresh process; what it prints."""
    command = [*wrapper, sys.executable, "-c", _PREAMBLE + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN, check=False, **more)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def start_fresh(code: str, **more: Any) -> subprocess.Popen[str]:
    """The same, without waiting for it."""
    return subprocess.Popen([sys.executable, "-c", _PREAMBLE + code], stdout=subprocess.PIPE, text=True, **more)


def lives(pid: int) -> bool:
    """Whether a process of this pid lives (a zombie does not)."""
    return processes.identity(pid) is not None


def pid_in(path: Path) -> int:
    """The pid in a file that a program of a test writes; 0 while it is not there or not complete."""
    text = path.read_text() if path.exists() else ""
    return int(text) if text.endswith("\n") else 0
