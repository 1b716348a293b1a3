# SPDX-License-Identifier: BSD-3-Clause
"""What a client stores of the apps that it has submitted: a file of each app in a folder of the state directory.

The certificates with which the submitting machine reaches a job over the network (``controller.run_queue``) are in
``clients/SCHEDULER/APP``, with mode 0600, until the app is deleted.
"""

from __future__ import annotations

import logging
import os
import urllib.parse
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

from torchx_monarch.backends.core import state_files
from torchx_monarch.exceptions import TorchXMonarchError

_CLIENTS = "clients"

_log = logging.getLogger("torchx_monarch")

T = TypeVar("T")


class StoredApps(Generic[T]):
    """The files of one folder.

    Args:
        cls: the data class of their content.
        folder: the names of its path below the state directory.
    """

    def __init__(self, cls: type[T], *folder: str) -> None:
        self._cls = cls
        self._names = folder

    @property
    def folder(self) -> str:
        return os.path.join(state_files.state_dir(), *self._names)

    def path(self, app_id: str) -> str:
        return os.path.join(self.folder, urllib.parse.quote(app_id, safe=""))

    def store(self, app_id: str, value: Any) -> None:
        """Store a value of an app, with mode 0600."""
        state_files.make_folder(*self._names)
        state_files.write_json(self.path(app_id), asdict(value), below=state_files.state_dir())

    def load(self, app_id: str) -> T | None:
        """Return what is stored of an app; None if nothing is, or, with a warning, if it must not or cannot be used."""
        try:
            return state_files.load(self._cls, self.path(app_id), state_files.state_dir())
        except state_files.DamagedFileError as error:
            _log.warning("what is stored of %s is not used: %s", app_id, error)
            return None

    def app_ids(self) -> list[str]:
        """Return the ids of all apps of which something is stored."""
        try:
            names = state_files.names_in(self.folder)
        except OSError as error:
            from torchx_monarch.backends.core.errors import StateAccessError  # imports TorchX

            raise StateAccessError(error, self.folder) from None
        # Not those that are being written, and of a desktop (.DS_Store).
        ids = (name for name in names if not name.startswith(".") and not name.endswith(".tmp"))
        return sorted(map(urllib.parse.unquote, ids))

    def remove(self, app_id: str) -> None:
        state_files.remove_file(self.path(app_id))


@dataclass(frozen=True)
class StoredCredentials:
    """What a client needs to reach an app.

    Attributes:
        credentials: the text of its ``credentials.ClientCredentials``.
        rendezvous: the address of replica 0 of each role, by the role's name; the host may be ``@NAME``, which only the
            hosts can resolve.
    """

    credentials: str = ""
    rendezvous: dict[str, str] = field(default_factory=dict)
    name: str = ""


def credentials(scheduler: str) -> StoredApps[StoredCredentials]:
    """Return the files with the credentials of the apps of a scheduler."""
    return StoredApps(StoredCredentials, _CLIENTS, scheduler)


def load_credentials(scheduler: str, app_id: str) -> StoredCredentials:
    """Return the credentials that are stored of an app; empty if nothing usable is stored."""
    return credentials(scheduler).load(app_id) or StoredCredentials()


def apps_with_credentials() -> list[tuple[str, str]]:
    """List all apps with credentials as scheduler and app id; warn of folders that belong to another user."""

    def ids_in(stored: StoredApps[StoredCredentials]) -> list[str]:
        try:
            return stored.app_ids()
        except TorchXMonarchError as error:
            _log.warning("%s", error)
            return []

    schedulers = ids_in(StoredApps(StoredCredentials, _CLIENTS))
    return [(scheduler, app_id) for scheduler in schedulers for app_id in ids_in(credentials(scheduler))]
