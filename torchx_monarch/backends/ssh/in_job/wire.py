# SPDX-License-Identifier: BSD-3-Clause
"""What client and machine must agree on. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchx_monarch.model.codec import Seconds
from torchx_monarch.model.state import State

READY = "torchx-monarch ssh 1"
"""The line that the entry writes first, behind what the shell's own files may have written."""

PYTHON_FILE = "ssh_python"
"""A file in the state directory of a machine: the interpreter that has started an app there last."""


@dataclass
class Place:
    """Where a replica runs, and what is known of its app: the content of place.json in its folder.

    Attributes:
        app_id: id of the app.
        role: index of its role.
        replica: its index in the role.
        created: when the app was submitted, in seconds since the epoch.
        grace: the run option ``grace``.
        machines: for each role the machines of its replicas, as the submitter names them.
        python: the run option ``python``.
        setup: the run option ``setup``.
        packed: the app, as ``SubmittedApp.pack`` has encoded it.
        gpus: the GPUs that it has, as CUDA_VISIBLE_DEVICES names them.
        address: the address of its machine.
    """

    app_id: str
    role: int
    replica: int
    created: Seconds
    grace: float
    machines: list[list[str]]
    python: str
    setup: str
    packed: str
    gpus: list[str] = field(default_factory=list)
    address: str = ""


@dataclass
class Ending:
    """How an app was asked to end: the content of ending.json in a replica's folder."""

    state: State
    message: str = ""
    time: Seconds = 0.0


def folder_name(app_id: str, role: int, replica: int) -> str:
    """Return the id under which a machine keeps a replica: of the app's id what precedes its first machine."""
    return f"{app_id.partition('@')[0]}.{role}.{replica}"
