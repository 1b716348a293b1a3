# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a host notes for its next start, where its backend starts it again whatever its exit code (dockerd does).

The backend names the file in ``MONARCH_STARTS``: paths separated by colons, of which the first is taken that can be
written and is on no mount. What is mounted may be another host's as well, or empty at the next start.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from typing import Any

from torchx_monarch.model.job_result import JobResult
from torchx_monarch.system import safe_files

VARIABLE = "MONARCH_STARTS"


class NoRestartMarker:
    """The starts of one host; nothing where the backend names no file.

    Args:
        environ: of the host.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._paths = [path for path in environ.get(VARIABLE, "").split(":") if path]
        self._note: dict[str, Any] = {}

    def begin(self) -> tuple[JobResult, str] | None:
        """Note that the host starts; or how its job has ended, and why it is not to be started again."""
        self._note = next((note for path in self._paths if (note := _read(path))), {"restarts": -1})
        with contextlib.suppress(KeyError, TypeError, AttributeError):
            return JobResult.from_json(self._note["verdict"]), str(self._note["why"])
        self._note["restarts"] += 1
        self._write()
        return None

    def end(self, verdict: JobResult, why: str) -> bool:
        """Note how the job has ended, where another start would be of no use; whether that could be noted.

        Args:
            verdict: how.
            why: why it is not to be started again; empty when it may be.
        """
        if not (self._paths and why):
            return True
        self._note.update(verdict=verdict.to_json(), why=why, time=time.time())
        return self._write()

    def _write(self) -> bool:
        mounts = _mounts() if self._paths else set()
        for path in self._paths:
            if _mount_of(path, mounts) != "/":
                continue
            with contextlib.suppress(OSError):
                os.makedirs(os.path.dirname(path), exist_ok=True)
                safe_files.replace_file(path, json.dumps(self._note).encode())
                return True
        return False


def _read(path: str) -> dict[str, Any] | None:
    """A note; None where there is none, or something else."""
    with contextlib.suppress(OSError, ValueError):
        note = safe_files.read_json(path)
        if isinstance(note, dict) and isinstance(note.get("restarts"), int):
            return note
    return None


def _mounts() -> set[str]:
    """Where something is mounted."""
    with contextlib.suppress(OSError), open("/proc/self/mountinfo") as file:
        return {line.split(" ")[4].encode().decode("unicode_escape") for line in file}
    return set()


def _mount_of(path: str, mounts: set[str]) -> str:
    place = os.path.realpath(os.path.dirname(path))
    while place != "/" and place not in mounts:
        place = os.path.dirname(place)
    return place
