# SPDX-License-Identifier: BSD-3-Clause
"""One job of a soak: submitting it, in this process or by a ``torchx run`` of its own, and watching it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from torchx.runner import Runner
from torchx.specs import AppState

from tests.soak.plans import Plan
from torchx_monarch.backends.core import state_files
from torchx_monarch.insight import events
from torchx_monarch.schedulers import monarch_local
from torchx_monarch.schedulers.monarch import MonarchScheduler
from torchx_monarch.system import processes

#: Seconds from SIGTERM to SIGKILL.
GRACE = 3
#: Seconds for which a host may be silent: longer than one that is stopped is left so, on a busy machine.
LEASE = 10
#: Seconds that a ``torchx run`` has to end after its job.
_SUBMITTER_ENDS_WITHIN = 30.0

_MARK = "TORCHX_MONARCH_SOAK"
"""In the environment of all processes of a job. The product's own mark would miss the same processes as the product."""

_submitting = threading.Lock()
"""Held while a job is submitted in this process, whose environment its processes get."""


class Job:
    """A submitted job.

    Attributes:
        plan: what was submitted.
        folder: of the proofs.
        runner, scheduler: what answers questions about it.
        submitter: the ``torchx run`` that submits it; None where this process has.
        began: when it was submitted, by ``time.monotonic``.
        run_dir: the folder of its sockets, as its request says; empty while that has not been read.
    """

    def __init__(self, plan: Plan, folder: Path, seed: int) -> None:
        self.plan = plan
        self.folder = folder
        self.runner = Runner("torchx", {"monarch_local": monarch_local})
        self.scheduler: MonarchScheduler = self.runner._scheduler("monarch_local")
        self.submitter: subprocess.Popen[bytes] | None = None
        self.began = time.monotonic()
        self.run_dir = ""
        self._app_id = ""
        self._mark = uuid.uuid4().hex
        cfg = {"grace": GRACE, "lease": LEASE, "spares": plan.spares, "ranks": "fresh" if plan.fresh else "fork"}
        cfg["preload"] = "json"
        if plan.by_command:
            self.submitter = self._run_command(cfg, seed)
            return
        with _submitting:
            os.environ[_MARK] = self._mark
            try:
                self._app_id = self.runner.run(plan.app(folder), "monarch_local", cfg=cfg).rpartition("/")[2]
            finally:
                del os.environ[_MARK]

    def _run_command(self, cfg: Mapping[str, object], seed: int) -> subprocess.Popen[bytes]:
        from tests.soak import component

        root = str(Path(component.__file__).parents[2])
        options = ["-s", "monarch_local", "-cfg", ",".join(f"{name}={value}" for name, value in cfg.items())]
        arguments = ["--seed", str(seed), "--number", str(self.plan.number), "--folder", str(self.folder)]
        with open(self.folder / "submitter.log", "wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "torchx.cli.main", "run", "--wait", *options]
                + [f"{component.__file__}:job", *arguments],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": root, _MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill_submitter()
        self.runner.close()

    def kill_submitter(self) -> None:
        """End the ``torchx run`` that submits it, if it still runs."""
        if self.submitter is not None and self.submitter.poll() is None:
            self.submitter.kill()
            self.submitter.wait()

    @property
    def app_id(self) -> str:
        """Its id; empty while, or when, it is not submitted."""
        if not self._app_id:
            prefix = f"soak{self.plan.number}-"
            names = [name for name in state_files.app_ids() if name.startswith(prefix)]
            self._app_id = next(filter(self.scheduler.exists, names), "")  # a folder may still be made
        return self._app_id

    @property
    def handle(self) -> str:
        return f"monarch_local://torchx/{self.app_id}"

    @property
    def paths(self) -> state_files.AppPaths:
        return state_files.app_paths(self.app_id)

    def note_run_dir(self) -> None:
        """Read ``run_dir`` once there is a request; it is not known any more when the app's folder is removed."""
        if not self.run_dir and self.app_id:
            self.run_dir = str((state_files.load_undamaged(dict, self.paths.request) or {}).get("run_dir", ""))

    def processes(self) -> list[int]:
        """The living processes of it, the ``torchx run`` and what that has started among them."""
        mark, found = f"{_MARK}={self._mark}".encode(), []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") and processes.identity(pid):
                    found.append(pid)
        return sorted(found)

    def seen(self) -> set[str]:
        """The kinds of the events so far (``plans.PHASES``)."""
        kinds = {event.get("kind", "") for event in events.read(self.paths.events)[0]} if self.app_id else set()
        return kinds | ({"rank_ended"} if any(self.folder.glob("end-*[0-9]")) else set())

    def wait(self, timeout: float) -> bool:
        """Wait until it has ended, or it is clear that it was never submitted; whether that is so."""
        until = time.monotonic() + timeout
        while not self.app_id:
            if self.submitter is None or self.submitter.poll() is not None:
                # What it has submitted is there now, or never.
                if not self.app_id:
                    return True
            elif time.monotonic() >= until:
                return False
            else:
                time.sleep(0.02)
        return self.scheduler.apps.wait(self.app_id, max(0.0, until - time.monotonic()))

    def state(self) -> AppState | None:
        """Its state; None for a job that does not exist."""
        status = self.runner.status(self.handle) if self.app_id else None
        return status.state if status is not None else None

    def submitter_code(self) -> int | None:
        """The exit code of the ``torchx run`` once its job has ended; None for one that does not end."""
        assert self.submitter is not None
        try:
            return self.submitter.wait(_SUBMITTER_ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            return None
