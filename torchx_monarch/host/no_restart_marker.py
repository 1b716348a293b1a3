# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Store a host's final result for its next start, for backends that restart a host whatever its exit code (dockerd).

The backend sets ``MONARCH_STARTS`` to paths separated by colons. The host uses the first path that it can write and
that is not on a mount: another host may share a mounted folder, and the folder may be empty at the next start.
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
    """Read and write the marker file of one host; do nothing if the backend names no file.

    Args:
        environ: environment of the host.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._paths = [path for path in environ.get(VARIABLE, "").split(":") if path]
        self._note: dict[str, Any] = {}

    def begin(self) -> tuple[JobResult, str] | None:
        """Count a start of the host, unless an earlier start has stored a final result.

        Returns:
            the stored result and why the host must not be restarted; None if the host may start.
        """
        self._note = next((note for path in self._paths if (note := _read(path))), {"restarts": -1})
        with contextlib.suppress(KeyError, TypeError, AttributeError):
            return JobResult.from_json(self._note["verdict"]), str(self._note["why"])
        self._note["restarts"] += 1
        self._write()
        return None

    def end(self, result: JobResult, why: str) -> bool:
        """Store the result of the job if the host must not be restarted.

        Args:
            result: the result of the job.
            why: why the host must not be restarted; empty if it may be.

        Returns:
            False if the result had to be stored and could not be.
        """
        if not (self._paths and why):
            return True
        self._note.update(verdict=result.to_json(), why=why, time=time.time())
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
    """Read a marker file; return None if it is missing or is not a marker."""
    with contextlib.suppress(OSError, ValueError):
        note = safe_files.read_json(path)
        if isinstance(note, dict) and isinstance(note.get("restarts"), int):
            return note
    return None


def _mounts() -> set[str]:
    """Return all mount points; empty if /proc cannot be read."""
    with contextlib.suppress(OSError), open("/proc/self/mountinfo") as file:
        return {line.split(" ")[4].encode().decode("unicode_escape") for line in file}
    return set()


def _mount_of(path: str, mounts: set[str]) -> str:
    place = os.path.realpath(os.path.dirname(path))
    while place != "/" and place not in mounts:
        place = os.path.dirname(place)
    return place
