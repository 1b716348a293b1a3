# SPDX-License-Identifier: BSD-3-Clause
"""Take the facts of this host that all hosts should have in common (``model.host_facts``)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from torchx_monarch.host.ranks.run_spec import RunSpec
from torchx_monarch.model.host_facts import HostFacts, ProgramFile


def take_facts(run: RunSpec, versions: Mapping[str, str]) -> HostFacts:
    """Return the facts of this host for a run, whose zygote has told ``versions``. It reads the script."""
    problem = "" if versions or not run.preload else "the import has failed"
    return HostFacts({**versions, **_driver()}, problem, _program(run), _paths(run))


def _driver() -> dict[str, str]:
    with contextlib.suppress(OSError):
        driver = re.search(r"Kernel Module\D+([\d.]+)", Path("/proc/driver/nvidia/version").read_text())
        if driver:
            return {"NVIDIA driver": driver[1]}
    return {}


def _script(run: RunSpec) -> str:
    """Return the path of the script of a run; empty for a module or another program."""
    program = run.command.program_of(0)
    return os.path.join(run.cwd or os.getcwd(), program.target) if program.mode == "script" else ""


def _paths(run: RunSpec) -> dict[str, str]:
    """Return the folder, the script and the PYTHONPATH of a run, each with the reason why it cannot be read."""
    cwd = run.cwd or os.getcwd()
    entries = [os.path.join(cwd, entry) for entry in run.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {path: _why_unreadable(path) for path in filter(None, (cwd, _script(run), *entries))}


def _why_unreadable(path: str) -> str:
    try:
        if os.path.isdir(path):
            with os.scandir(path) as entries:
                next(entries, None)
        else:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _program(run: RunSpec) -> ProgramFile | None:
    path = _script(run)
    if path and os.path.isfile(path):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            content = file.read()
            return ProgramFile(path, len(content), hashlib.sha256(content).hexdigest())
    return None
