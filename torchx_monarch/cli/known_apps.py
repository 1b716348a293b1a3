# SPDX-License-Identifier: BSD-3-Clause
"""The apps that this machine has a record of: those that were submitted with its state directory.

No scheduler is asked, so that an app is found within milliseconds, whatever cannot be reached.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

from torchx_monarch.backends.core import client_credentials, state_files

LOCAL = "monarch_local"


@dataclass(frozen=True)
class KnownApp:
    """An app of this machine's records.

    Attributes:
        scheduler: the name of its scheduler.
        app_id: its id.
        name: its name; empty if the records lack it.
        submitted: when it was submitted, in seconds since the epoch.
    """

    scheduler: str
    app_id: str
    name: str
    submitted: float

    @property
    def handle(self) -> str:
        """The app's TorchX handle."""
        return f"{self.scheduler}://torchx/{self.app_id}"

    @property
    def words(self) -> set[str]:
        """The words that name the app: its id, also without a namespace or queue (``default:app-x7``), and its name."""
        return {self.app_id, self.app_id.rpartition(":")[2], self.name} - {""}


def known_apps() -> list[KnownApp]:
    """Return all apps, the newest first."""
    found = []
    with contextlib.suppress(OSError):
        for app_id in state_files.app_ids():
            found.append(_app(LOCAL, app_id, state_files.app_paths(app_id).app))
    for scheduler, app_id in client_credentials.stored_apps():
        found.append(_app(scheduler, app_id, client_credentials.path(scheduler, app_id)))
    return sorted(found, key=lambda app: (app.submitted, app.app_id), reverse=True)


def _app(scheduler: str, app_id: str, file: str) -> KnownApp:
    """Return an app whose submission has written this file."""
    submitted = 0.0
    with contextlib.suppress(OSError):
        submitted = os.lstat(file).st_mtime
    name = "" if scheduler == LOCAL else client_credentials.name_of(scheduler, app_id)
    if not name:  # TorchX makes most ids of the name and a random suffix (torchx.schedulers.ids.make_unique)
        name = app_id.rpartition("-")[0].rpartition(":")[2]
    return KnownApp(scheduler, app_id, name, submitted)


def used_schedulers() -> list[str]:
    """Return the names of the schedulers that have run an app of this machine's records, the local one first."""
    names = {scheduler for scheduler, _ in client_credentials.stored_apps()}
    return [LOCAL, *sorted(names - {LOCAL})]
