# SPDX-License-Identifier: BSD-3-Clause
"""Store the certificates with which the submitting machine reaches a job over the network (``controller.run_queue``).

Each app has one file of mode 0600 below the state directory (``state_files``):
``clients/SCHEDULER/APP``. It exists until the app is deleted.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from torchx_monarch.backends.core.stored_apps import StoredApps
from torchx_monarch.exceptions import TorchXMonarchError

_log = logging.getLogger("torchx_monarch")

_FOLDER = "clients"


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


def files(scheduler: str) -> StoredApps[StoredCredentials]:
    """Return the files of the apps of a scheduler."""
    return StoredApps(StoredCredentials, _FOLDER, scheduler)


def load(scheduler: str, app_id: str) -> StoredCredentials:
    """Return what is stored of an app; empty if nothing usable is stored."""
    return files(scheduler).load(app_id) or StoredCredentials()


def stored_apps() -> list[tuple[str, str]]:
    """List all stored apps as pairs of scheduler and app id; warn of folders that belong to another user."""
    schedulers = _ids_in(StoredApps(StoredCredentials, _FOLDER))
    return [(scheduler, app_id) for scheduler in schedulers for app_id in _ids_in(files(scheduler))]


def _ids_in(stored: StoredApps[StoredCredentials]) -> list[str]:
    try:
        return stored.app_ids()
    except TorchXMonarchError as error:
        _log.warning("%s", error)
        return []
