# SPDX-License-Identifier: BSD-3-Clause
"""Apps on a Slurm cluster, through TorchX's Runner and the scheduler as users have it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torchx.specs import AppState, Resource, Role
from torchx.specs.finder import ComponentValidationException

from tests.clusters.slurm.cluster import SlurmCluster
from tests.contract.place import Place
from tests.waits import WITHIN, until
from torchx_monarch.backends.batch.folder import JobFolder
from torchx_monarch.backends.slurm.backend import SlurmBackend
from torchx_monarch.client.connection import Target
from torchx_monarch.exceptions import UnreachableError
from torchx_monarch.schedulers import monarch_slurm
from torchx_monarch.transport.address import Address

NAME = "monarch_slurm"
SMALL = Resource(cpu=1, gpu=0, memMB=1024)


def sh(command: str, name: str = "r", replicas: int = 1, **more: Any) -> Role:
    """A role that runs a shell command."""
    args = ["-c", command]
    return Role(name, image="", entrypoint="sh", args=args, num_replicas=replicas, resource=SMALL, **more)


class Apps(Place):
    """A Slurm cluster.

    Args:
        cluster: where they run.
        folder: where programs are written.
    """

    name = NAME
    factory = staticmethod(monarch_slurm)
    own_bad_options = (
        ({"partitoin": "main"}, "(?s)partitoin.*partition"),
        ({"partition": "nosuch"}, "invalid partition"),
        ({"signal": "USR1@60"}, "`signal` is 'USR1@60'; allowed is B:TERM@SECONDS"),
        ({"container": "oci"}, "`container` is 'oci'; allowed is pyxis"),
    )
    request_function = "torchx_monarch.backends.batch.backend:BatchBackend.run"
    install = "Debian: slurm-client"
    resource = SMALL
    has_machines = True
    names_preemptions = False  # Slurm signals the tasks, and the batch step announces a stop to them: either is first

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster = cluster
        super().__init__(folder)

    def facts(self) -> object:
        """Return nothing: batch steps and tasks write of themselves."""
        return ()

    def is_read(self, *request: Any) -> bool:
        """Return whether a command of Slurm's only answers."""
        command = list(request[1])
        return command[0] in ("squeue", "sacct", "sinfo") or command[:2] == ["scontrol", "show"]

    @contextlib.contextmanager
    def reached(self, handle: str) -> Iterator[str]:
        """Yield the address of the node: this machine does not know the cluster's names."""
        found: list[Address] = []

        def find() -> bool:
            with contextlib.suppress(UnreachableError):  # the task has not said yet where it runs
                found.append(Target.from_handle(handle, runner=self.runner).address)
            return bool(found)

        self.until(find, "the address", handle)
        yield self.cluster.reached(found[0])

    def client(self, handle: str) -> tuple[Sequence[str], str]:
        """Become a login node, which knows the nodes by name."""
        hosts = f"{self.cluster.conf.parent}/hosts"
        return ("unshare", "--mount", "sh", "-c", f'mount --bind {hosts} /etc/hosts; exec "$0" "$@"'), ""

    def component_words(self) -> Sequence[str]:
        """Return the options of ``monarch.spmd`` by which two hosts fit the cluster."""
        return ("--cpu", "1", "--memMB", "1024")

    def slurm_state(self, app_id: str) -> str:
        """Slurm's word; empty for a job that it has forgotten."""
        words = ["squeue", "--noheader", "--states=all", "--format=%i|%T"]
        shown = [line.split("|") for line in SlurmBackend().run(words).splitlines()]
        return next((state for job, state in shown if job.partition("+")[0] == app_id), "")

    def output(self, handle: str, replica: int = 0, role: str = "trainer", **more: Any) -> str:
        """Return the log of one replica."""
        return "".join(self.lines(handle, replica, role, **more))

    def wait_for_output(self, handle: str, text: str, replica: int = 0, role: str = "trainer", times: int = 1) -> None:
        """Wait until a replica has printed a text this many times."""
        self.until(lambda: self.output(handle, replica, role).count(text) >= times, repr(text), handle)

    def mine(self) -> list[tuple[str, AppState]]:
        """Return names and states of this test's apps: Slurm still knows those of earlier tests."""
        listed = self.runner.list(NAME)
        return sorted((app.name, app.state) for app in listed if app.app_handle in self._handles)

    def paths(self, handle: str) -> JobFolder:
        """Return the folder of an app's job."""
        folder = self.backend.folder(handle.rpartition("/")[2])
        assert isinstance(folder, JobFolder)
        return folder

    def everything(self, handle: str) -> str:
        """Return what the job has written, for the message of a failure."""
        root = Path(self.paths(handle).root)
        names = ("job.log", "job.json", "replica.json", "combined.log", "stdout.log", "stderr.log")
        files = [path for path in sorted(root.rglob("*")) if path.name in names and path.is_file()]
        return "\n".join(f"== {path}\n{path.read_text()}" for path in files)

    def lose(self, handle: str, replica: int) -> None:
        """Kill the host."""
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

    @contextlib.contextmanager
    def without_machine(self, handle: str, role: str, replica: int) -> Iterator[None]:
        """Have the power of a node fail."""
        node = self.hostname(handle, replica, [found.role for found in self.status(handle).roles].index(role))
        self.cluster.lose_node(node)
        try:
            yield
        finally:
            self.cluster.restore_node(node)
            for path in Path(os.environ["TMPDIR"]).iterdir():  # what the power has taken with it could not clean up
                shutil.rmtree(path, ignore_errors=True)

    @contextlib.contextmanager
    def preempting(self) -> Iterator[None]:
        """Have a job of the partition ``urgent`` want all nodes: the others have ``GRACE`` seconds to end."""
        nodes = f"-N{len(self.cluster.nodes)}"
        words = ["sbatch", "--parsable", "-p", "urgent", "--exclusive", nodes, "-o", "/dev/null", "--wrap=sleep 900"]
        urgent = subprocess.run(words, capture_output=True, text=True, check=True, timeout=WITHIN).stdout.strip()
        try:
            yield
        finally:
            subprocess.run(["scancel", urgent], check=True, timeout=WITHIN)

    def preempt(self, handle: str, replica: int) -> None:
        """Have a job that is more urgent take its nodes, and Slurm start it again soon."""
        app_id = handle.rpartition("/")[2]
        with self.preempting():
            self.until(lambda: self.slurm_state(app_id) == "PENDING", "the queue", handle)
            assert self.status(handle).state is AppState.PENDING
        # Slurm would hold it for two minutes.
        subprocess.run(["scontrol", "update", f"JobId={app_id}", "StartTime=now+3"], check=True, timeout=WITHIN)

    @contextlib.contextmanager
    def pending(self) -> Iterator[str]:
        """Fill the cluster with another job."""
        first = self.run(sh("sleep 1000", replicas=len(self.cluster.nodes)), name="first", exclusive=True)
        self.until(lambda: set(self.states(first).values()) == {AppState.RUNNING}, "the first job", first)
        handle = self.run(self.role("true", replicas=2), name="second")
        self.until(lambda: "PENDING: waits for " in self.status(handle).msg, "a reason", handle)
        yield handle
        self.runner.cancel(first)

    def credentials(self, handle: str) -> tuple[str, str]:
        """Return the credentials in the job's folder, and what Slurm shows of the job."""
        app_id = handle.rpartition("/")[2]
        root = Path(self.paths(handle).root)
        assert root.stat().st_mode & 0o77 == 0
        secrets = [path.read_text() for path in root.rglob("*") if path.name == "request.json"]
        shown = subprocess.run(
            ["scontrol", "show", "job", app_id, "-d"], capture_output=True, text=True, check=True, timeout=WITHIN
        )
        return "".join(secrets), shown.stdout

    def left(self, handle: str) -> Sequence[object]:
        """Return files of jobs, and what is in the folder for temporary files."""
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
        """End what still runs."""
        left = [handle.rpartition("/")[2] for handle in self._handles]
        for app_id in left:
            subprocess.run(["scancel", app_id], check=False, capture_output=True, timeout=240)
        running = ("RUNNING", "COMPLETING")
        until(lambda: not any(self.slurm_state(app_id) in running for app_id in left), "the end of jobs", 60, every=0.1)
        self.runner.close()
