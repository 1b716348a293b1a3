# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Record which processes own an app, on which machine, and check whether they are alive (supervisor.json)."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from torchx_monarch.system.processes import ProcessIdentity, identity


@dataclass(frozen=True)
class Machine:
    """Where pids are valid: one boot of one machine, and one pid namespace on it."""

    hostname: str
    machine_id: str
    boot_id: str
    pid_namespace: str


def _first_line(path: str) -> str:
    try:
        with open(path) as file:
            return file.readline().strip()
    except OSError:
        return ""


def this_machine() -> Machine:
    """Return the machine on which this process runs."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    boot = _first_line("/proc/sys/kernel/random/boot_id")
    return Machine(os.uname().nodename, _first_line("/etc/machine-id"), boot, namespace)


class ProcessStatus(Enum):
    """Whether a process is alive that was recorded earlier, perhaps on another machine."""

    ALIVE = "alive"
    DEAD = "dead"
    REBOOTED = "dead: the machine was rebooted since"
    ELSEWHERE = "on another machine or in another container: cannot be seen from here"


@dataclass(frozen=True)
class Owners:
    """The content of supervisor.json: the processes that own an app.

    Attributes:
        machine: where they run.
        keeper: the process that records the app's end if the supervisor dies.
        supervisor: the process that runs the app.
    """

    machine: Machine
    keeper: ProcessIdentity
    supervisor: ProcessIdentity

    def to_json(self) -> dict[str, Any]:
        # asdict() leaves named tuples as they are, and JSON would write them as lists.
        watchers = {name: each._asdict() for name, each in (("keeper", self.keeper), ("supervisor", self.supervisor))}
        return {"machine": asdict(self.machine), **watchers}

    def life(self, which: ProcessIdentity) -> ProcessStatus:
        """Return whether a process of this record is alive.

        Args:
            which: ``keeper`` or ``supervisor``.
        """
        here = this_machine()
        if self.machine.boot_id != here.boot_id:
            # Many machines may share a home directory: another boot id means a reboot only on the same machine.
            same = self.machine.hostname == here.hostname or (
                self.machine.machine_id == here.machine_id and here.machine_id != ""
            )
            return ProcessStatus.REBOOTED if same else ProcessStatus.ELSEWHERE
        if self.machine.pid_namespace != here.pid_namespace:
            return ProcessStatus.ELSEWHERE
        return ProcessStatus.ALIVE if identity(which.pid) == which else ProcessStatus.DEAD
