# SPDX-License-Identifier: BSD-3-Clause
"""Apps on machines over ssh, through TorchX's Runner and the scheduler as users have it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.clusters.ssh.machines import CONNECT_TIMEOUT, Machines
from tests.contract.place import QueuePlace, tree
from tests.waits import until
from torchx_monarch.backends.ssh.in_job.wire import folder_name
from torchx_monarch.schedulers import monarch_ssh

NAME = "monarch_ssh"
STATE = "/root/.local/state/torchx-monarch"
"""Where the machines keep what they know of apps."""


class Apps(QueuePlace):
    """Machines m1, m2, ...

    Args:
        machines: where they run.
        hosts: names of the machines that apps use, in this order; all if empty.
    """

    name = NAME
    factory = staticmethod(monarch_ssh)
    request_function = "torchx_monarch.backends.ssh.connection:MachineConnection.ask"
    install = "Debian: openssh-client"
    own_bad_options = (
        ({"hosts": ["m1"]}, "trainer has 2 replicas, and the machines of run option `hosts` are 1"),
        ({"hosts": ["-oProxyCommand=x", "m2"]}, "'-oProxyCommand=x' is no machine"),
        ({"hosts": ["m1", "m2:99999"]}, "'m2:99999' is no machine"),
        ({"hosts": ["m1", "m1"]}, "names m1 twice"),
        ({"hosts": ["@/nonexistent"]}, "/nonexistent: No such file"),
        ({"slots": 10**6}, r"`slots`.*: 1000000; this machine \(m[12]\) has"),
    )
    has_machines = True

    def __init__(self, machines: Machines, hosts: Sequence[str] = ()) -> None:
        self.machines = machines
        self.hosts = list(hosts or machines.names)
        self.cfg = {**self.cfg, "hosts": self.hosts, "python": sys.executable}
        self.list_cfg = {"hosts": self.hosts[:1], "python": sys.executable}  # the first replica of every app is there
        folder = machines.shared / uuid.uuid4().hex[:8]
        folder.mkdir()
        super().__init__(folder)

    def facts(self) -> object:
        """Return the files and processes of the machines as well."""
        every = [tree(machine.path(STATE) / "apps") for machine in self.machines]
        return super().facts(), every, self.running()

    def is_read(self, *request: Any) -> bool:
        """Return whether an order changes nothing."""
        return request[1] in ("hello", "read", "read_all", "log")

    def run_words(self) -> Sequence[str]:
        """Return the options of ``torchx run`` that name the machines."""
        return ("-cfg", f"hosts={';'.join(self.hosts)},python={sys.executable}")

    def host(self, handle: str, replica: int, role: str = "trainer") -> int:
        """Return the pid of a replica's host, as this machine counts."""
        wanted = [b"--app", handle.rpartition("/")[2].encode(), b"--role", role.encode(), b"--replica", b"%d" % replica]
        found = []
        for machine in self.machines:
            for pid in machine.processes() if machine.is_on else ():
                with contextlib.suppress(OSError):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                    if b"torchx_monarch.host" in words and words[3:9] == wanted:
                        found.append(pid)
        assert found, f"replica {replica} has no host process\n{self.everything(handle)}"
        return min(found)  # the others are its children

    def lose(self, handle: str, replica: int) -> None:
        """Kill the host."""
        os.kill(self.host(handle, replica), signal.SIGKILL)

    @contextlib.contextmanager
    def without_machine(self, handle: str, role: str, replica: int) -> Iterator[None]:
        """Have the power of a machine fail."""
        roles = [found.role for found in self.status(handle).roles]
        machine = self.machines[self.hostname(handle, replica, roles.index(role))]
        machine.power_off()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(CONNECT_TIMEOUT, "2")
            yield
        machine.boot()
        greeting = ["ssh", machine.name, "true"]  # this machine has noted that there is no route to it
        until(lambda: subprocess.run(greeting, capture_output=True).returncode == 0, f"a route to {machine.name}")

    def preempt(self, handle: str, replica: int) -> None:
        """Send the host SIGTERM, as a machine does that shuts down."""
        os.kill(self.host(handle, replica), signal.SIGTERM)

    def credentials(self, handle: str) -> tuple[str, str]:
        """Return the credentials, which are in the folders of the replicas, and all command lines of the machines."""
        place = folder_name(handle.rpartition("/")[2], 0, 0)
        root = self.machines[self.hosts[0]].path(STATE) / "apps" / place
        assert root.stat().st_mode & 0o77 == 0
        request = json.loads((root / "request.json").read_text())
        return request["roles"][0]["env"]["MONARCH_CREDENTIALS"], str(self.machines.processes())

    def files(self) -> list[str]:
        """Return the folders of replicas in the state folders of the machines."""
        roots = [(machine, machine.path(STATE) / "apps") for machine in self.machines]
        return [f"{machine.name}: {path.name}" for machine, root in roots if root.is_dir() for path in root.iterdir()]

    def running(self, *names: str) -> list[str]:
        """Return what runs on machines (all without names), beside the ends of clients' connections."""
        lines = [line for line in self.machines.processes() if not names or line.startswith(tuple(names))]
        return [line for line in lines if "in_job.entry" not in line]

    def left(self, handle: str) -> Sequence[object]:
        """Return what names the app on any machine, and processes of any app."""
        app_id = handle.rpartition("/")[2]
        named = [line for line in self.files() if app_id.partition("@")[0] in line]
        return [*named, *self.running()]

    def close(self) -> None:
        """Delete the apps, and end the connections that wait for the next command."""
        self.machines.mend()
        try:
            super().close()
        finally:
            end_connections()


def end_connections() -> None:
    """End the ssh processes of this test that wait for the next command to the same machine."""
    mark = os.environ["TORCHX_MONARCH_TEST"]
    for process in psutil.process_iter(["name"]):
        if process.info["name"] == "ssh":
            with contextlib.suppress(psutil.Error):
                if process.environ().get("TORCHX_MONARCH_TEST") == mark:
                    process.terminate()
