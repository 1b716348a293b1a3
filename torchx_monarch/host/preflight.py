# SPDX-License-Identifier: BSD-3-Clause
"""Take the facts of this host that all hosts should have in common (``model.host_facts``)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path

from torchx_monarch.host.ranks.run_spec import RunSpec
from torchx_monarch.model.host_facts import PROGRAM, HostFacts


def take_facts(run: RunSpec, versions: HostFacts) -> HostFacts:
    """Return the facts of this host for a run, whose zygote has told ``versions``. It reads the script."""
    return {**versions, **_driver(), **_program(run)}


def _driver() -> HostFacts:
    with contextlib.suppress(OSError):
        driver = re.search(r"Kernel Module\D+([\d.]+)", Path("/proc/driver/nvidia/version").read_text())
        if driver:
            return {"NVIDIA driver": driver[1]}
    return {}


def _program(run: RunSpec) -> HostFacts:
    program = run.command.program_of(0)
    path = os.path.join(run.cwd or os.getcwd(), program.target)
    if program.mode == "script" and os.path.isfile(path):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            return {PROGRAM: f"of SHA-256 {hashlib.sha256(file.read()).hexdigest()[:12]}"}
    return {}
