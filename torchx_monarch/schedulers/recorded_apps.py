# SPDX-License-Identifier: BSD-3-Clause
"""The apps that were submitted with this machine's state directory, by the words that name them.

No scheduler is asked, so that an app is found within milliseconds, whatever cannot be reached.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

from torchx_monarch.backends.core import state_files, stored_apps
from torchx_monarch.schedulers import NAMES

LOCAL = "monarch_local"

LAST = "last"
"""The word for the app that was submitted last."""


@dataclass(frozen=True)
class RecordedApp:
    """An app of this machine's records; its name is empty if they lack it."""

    scheduler: str
    app_id: str
    name: str
    submitted: float

    @property
    def handle(self) -> str:
        return f"{self.scheduler}://torchx/{self.app_id}"

    @property
    def words(self) -> set[str]:
        """The words that name the app: its id, also without a namespace or queue (``default:app-x7``), and its name."""
        return {self.app_id, self.app_id.rpartition(":")[2], self.name} - {""}


def recorded_apps() -> list[RecordedApp]:
    """Return all apps, the newest first; raise StateAccessError if the state directory cannot be read."""
    found, folder = [], state_files.state_dir()
    links = {name: os.path.join(folder, name.removeprefix("monarch_"), state_files.BATCH_IDS) for name in NAMES}
    try:
        app_ids = state_files.app_ids()
        linked = {(name, app_id) for name, path in links.items() for app_id in state_files.names_in(path)}
    except OSError as error:
        from torchx_monarch.backends.core.errors import StateAccessError  # imports TorchX

        raise StateAccessError(error, folder) from None
    for app_id in app_ids:
        paths = state_files.app_paths(app_id)
        if os.path.lexists(paths.status):  # written last
            found.append(_app(LOCAL, app_id, paths.app))
    known = stored_apps.apps_with_credentials()
    for scheduler, app_id in known:
        found.append(_app(scheduler, app_id, stored_apps.credentials(scheduler).path(app_id)))
    for scheduler, app_id in linked - set(known):  # a submitter that was killed has stored no credentials
        found.append(_app(scheduler, app_id, os.path.join(links[scheduler], app_id)))
    return sorted(found, key=lambda app: (app.submitted, app.app_id), reverse=True)


def named(word: str) -> list[RecordedApp]:
    """Return the apps that a word names, the newest first.

    An id or a name counts before the beginning of another one, and a name that several apps have means the newest.
    """
    apps = recorded_apps()
    for exact in ([app for app in apps if app.app_id == word], [app for app in apps if word in app.words]):
        if exact:
            return exact[:1]
    return [app for app in apps if any(app_word.startswith(word) for app_word in app.words)] if word else []


def _app(scheduler: str, app_id: str, file: str) -> RecordedApp:
    submitted = 0.0
    with contextlib.suppress(OSError):
        submitted = os.lstat(file).st_mtime
    name = "" if scheduler == LOCAL else stored_apps.load_credentials(scheduler, app_id).name
    if not name:  # TorchX makes most ids of the name and a random suffix (torchx.schedulers.ids.make_unique)
        name = app_id.rpartition("-")[0].rpartition(":")[2]
    return RecordedApp(scheduler, app_id, name, submitted)
