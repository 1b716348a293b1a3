# SPDX-License-Identifier: BSD-3-Clause
"""Keep the result of a host that must not be restarted, for backends that restart it whatever its exit code (dockerd).

The host then ends with code 0, after which dockerd does not restart it. The backend sets ``MONARCH_STARTS`` to paths
separated by colons. The host uses the first path that it can write and that is not on a mount: another host may share a
mounted folder, and the folder may be empty at the next start.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace

from torchx_monarch.model.host_result import HostResult
from torchx_monarch.system import safe_files

VARIABLE = "MONARCH_STARTS"


class NoRestartMarker:
    """Read and write the marker file of one host; do nothing if the backend names no file.

    Attributes:
        restarts: how often the host was restarted, as far as a marker file says.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._paths = [path for path in environ.get(VARIABLE, "").split(":") if path]
        self.restarts = 0

    def begin(self) -> None:
        """Count a start of the host."""
        found = next((result for path in self._paths if (result := _read(path))), None)
        self.restarts = 0 if found is None or found.restarts is None else found.restarts + 1
        self._write(HostResult(restarts=self.restarts))

    def end(self, result: HostResult) -> bool | None:
        """Store the result of the host if it must not be restarted; return whether that was possible, else None."""
        if not (self._paths and result.forbids_restart):
            return None
        return self._write(replace(result, restarts=self.restarts))

    def _write(self, result: HostResult) -> bool:
        mounts = _mounts() if self._paths else set()
        for path in self._paths:
            place = os.path.realpath(os.path.dirname(path))
            while place != "/" and place not in mounts:
                place = os.path.dirname(place)
            with contextlib.suppress(OSError):
                if place == "/":
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                    safe_files.replace_file(path, result.to_text().encode())
                    return True
        return False


def _read(path: str) -> HostResult | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        result = HostResult.from_text(safe_files.read_file(path).decode())
        return result if result.restarts is not None else None
    return None


def _mounts() -> set[str]:
    """Return all mount points. (The device number does not tell a bind mount of the same file system.)"""
    with contextlib.suppress(OSError), open("/proc/self/mountinfo") as file:
        return {line.split(" ")[4].encode().decode("unicode_escape") for line in file}
    return set()
