# SPDX-License-Identifier: BSD-3-Clause
"""What client and machine must agree on. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchx_monarch.backends.core.snapshot import Outcome
from torchx_monarch.backends.local.supervision import SupervisorRecord
from torchx_monarch.insight.events import Event
from torchx_monarch.model.codec import Seconds

READY = "torchx-monarch ssh 1"
"""The line that the entry writes first, behind what the shell's own files may have written."""

PYTHON_FILE = "ssh_python"
"""A file in the state directory of a machine: the interpreter that has started an app there last."""

MAX_TEXT = 1 << 18
"""Characters of a log after which an answer ends."""


@dataclass(frozen=True)
class Layout:
    """Where an app runs.

    Attributes:
        machines: for each role the machines of its replicas, as the submitter names them.
        python: the run option ``python``; empty for the interpreter by which a machine has run an app last.
        setup: the run option ``setup``.
    """

    machines: list[list[str]]
    python: str = ""
    setup: str = ""

    @property
    def replicas(self) -> dict[str, list[tuple[int, int]]]:
        """For each machine its replicas: index of the role, and id."""
        found: dict[str, list[tuple[int, int]]] = {}
        for role, names in enumerate(self.machines):
            for replica, name in enumerate(names):
                found.setdefault(name, []).append((role, replica))
        return found


@dataclass
class Place:
    """Where a replica runs, and what is known of its app: the content of place.json in its folder.

    Attributes:
        role: index of its role.
        replica: its index in the role.
        created: when the app was submitted, in seconds since the epoch.
        packed: the app, as ``SubmittedApp.pack`` has encoded it.
        address: the address of its machine.
    """

    app_id: str
    role: int
    replica: int
    created: Seconds
    layout: Layout
    packed: str
    address: str = ""


@dataclass
class FoundReplica:
    """One replica as its machine answers.

    Attributes:
        ending: how the app was asked to end; None if it was not.
        events: of a replica 0 the events that its machine has; empty in a brief answer.
    """

    place: Place
    record: SupervisorRecord
    ending: Outcome | None
    events: list[Event] = field(default_factory=list)


def folder_name(app_id: str, role: int, replica: int) -> str:
    """Return the id of a replica's folder on its machine, NAME-SUFFIX.ROLE.REPLICA."""
    return f"{app_id.partition('@')[0]}.{role}.{replica}"
