# SPDX-License-Identifier: BSD-3-Clause
"""Apps on monarch_local, as the contract uses them."""

from __future__ import annotations

import os
import signal

from tests.contract.place import QueuePlace
from tests.local.detached import Detached
from torchx_monarch.backends.core import state_files
from torchx_monarch.schedulers import monarch_local


class LocalPlace(QueuePlace):
    """This machine."""

    name = "monarch_local"
    factory = staticmethod(monarch_local)
    cannot = {
        "credentials not on show": "hosts of one machine meet at socket files of their own and need none",
        "missing tool says what to install": "it needs nothing beside this package",
    }

    def lose(self, handle: str, replica: int) -> None:
        """Kill the host."""
        os.kill(Detached().host(handle.rpartition("/")[2], replica), signal.SIGKILL)

    def preempt(self, handle: str, replica: int) -> None:
        """Send the host SIGTERM, as a machine does that shuts down."""
        os.kill(Detached().host(handle.rpartition("/")[2], replica), signal.SIGTERM)

    def left(self, handle: str) -> list[str]:
        """Return the app's folders; that no process is left is checked after each test."""
        paths = state_files.app_paths(handle.rpartition("/")[2])
        return [path for path in (paths.root, paths.run) if os.path.exists(path)]
