# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Apps on a Slurm cluster, as the contract uses them."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torchx.specs import AppState, Role
from torchx.specs.finder import ComponentValidationException

from tests.clusters.slurm.apps import NAME, SMALL, Apps, sh
from tests.contract.place import Place
from torchx_monarch.schedulers import monarch_slurm


class SlurmPlace(Place):
    """A Slurm cluster.

    Args:
        apps: further shorthands on the same cluster.
        folder: where programs are written.
    """

    name = NAME
    factory = staticmethod(monarch_slurm)
    own_bad_options = (
        ({"partitoin": "main"}, "(?s)partitoin.*partition"),
        ({"partition": "nosuch"}, "invalid partition"),
    )
    install = "Debian: slurm-client"
    names_preemptions = False  # Slurm signals the tasks, and the batch step announces a stop to them: either is first

    def __init__(self, apps: Apps, folder: Path) -> None:
        super().__init__(folder)
        self._apps = apps

    def adopt(self, handle: str) -> str:
        """End this app, too, at the end of the test."""
        return self._apps.adopt(handle)

    def everything(self, handle: str) -> str:
        """Return all files of the job."""
        return self._apps.everything(handle)

    def role(self, entrypoint: str, *args: str, name: str = "trainer", replicas: int = 1, **more: Any) -> Role:
        """Return a role that asks for little."""
        return super().role(entrypoint, *args, name=name, replicas=replicas, resource=SMALL, **more)

    def component_words(self) -> Sequence[str]:
        """Return the options of ``monarch.spmd`` by which two hosts fit the cluster."""
        return ("--cpu", "1", "--memMB", "1024")

    def lose(self, handle: str, replica: int) -> None:
        """Kill the host."""
        self._apps.kill_host(handle, replica)

    def preempt(self, handle: str, replica: int) -> None:
        """Have Slurm put the job back into the queue, and start it soon."""
        app_id = handle.rpartition("/")[2]
        subprocess.run(["scontrol", "requeue", app_id], check=True)
        self.until(lambda: self._apps.slurm_state(app_id) == "PENDING", "the queue", handle)
        assert self.status(handle).state is AppState.PENDING
        # Slurm would hold it for two minutes.
        subprocess.run(["scontrol", "update", f"JobId={app_id}", "StartTime=now+3"], check=True)

    @contextlib.contextmanager
    def pending(self) -> Iterator[str]:
        """Fill the cluster with another job."""
        first = self._apps.run(sh("sleep 1000", replicas=4), name="first", exclusive=True)
        self.until(lambda: self.status(first).state is AppState.RUNNING, "the first job", first)
        handle = self.run(self.role("true", replicas=2), name="second")
        self.until(lambda: "PENDING: waits for " in self.status(handle).msg, "a reason", handle)
        yield handle
        self.runner.cancel(first)

    def credentials(self, handle: str) -> tuple[str, str]:
        """Return the credentials in the job's folder, and what Slurm shows of the job."""
        app_id = handle.rpartition("/")[2]
        root = Path(self._apps.paths(handle).root)
        assert root.stat().st_mode & 0o77 == 0
        secrets = [path.read_text() for path in root.rglob("*") if path.name == "request.json"]
        shown = subprocess.run(["scontrol", "show", "job", app_id, "-d"], capture_output=True, text=True, check=True)
        return "".join(secrets), shown.stdout

    def left(self, handle: str) -> Sequence[object]:
        """Return files of jobs, and what is in the folder for temporary files.

        The link by the job's id stays while Slurm remembers the job: it marks the job as deleted.
        """
        jobs = Path(os.environ["MONARCH_STATE_DIR"], "slurm").rglob("*")
        return [path for path in jobs if path.is_file()] + list(Path(os.environ["TMPDIR"]).iterdir())

    def message_without_client(self) -> str:
        """Return what a submission and a list say without Slurm's commands."""
        said = []
        with pytest.MonkeyPatch.context() as without:
            without.setenv("PATH", "/nonexistent")
            words = "is not on the PATH.*Debian: slurm-client"
            for ask in (lambda: self.run(self.role("true")), lambda: self.runner.list(NAME)):
                with pytest.raises(ComponentValidationException, match=words) as caught:
                    ask()
                said.append(str(caught.value))
        return said[0]

    def close(self) -> None:
        """Close the runner; ``Apps`` ends the jobs."""
        self.runner.close()
