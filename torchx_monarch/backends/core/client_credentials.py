# SPDX-License-Identifier: BSD-3-Clause
"""Store the certificates with which the submitting machine reaches a job over the network (``controller.run_queue``).

Each app has one file of mode 0600 below the state directory (``state_files``):
``clients/SCHEDULER/APP``. It exists until the app is deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from torchx_monarch.backends.core.stored_apps import StoredApps
from torchx_monarch.exceptions import TorchXMonarchError

_log = logging.getLogger("torchx_monarch")

_FOLDER = "clients"


@dataclass
class _StoredCredentials:
    """The content of the file: the arguments of ``keep`` with the same names."""

    name: str = ""
    credentials: str = ""
    rendezvous: dict[str, str] = field(default_factory=dict)


def _files(scheduler: str) -> StoredApps[_StoredCredentials]:
    return StoredApps(_StoredCredentials, _FOLDER, scheduler)


def path(scheduler: str, app_id: str) -> str:
    """Return the path of an app's file."""
    return _files(scheduler).path(app_id)


def keep(scheduler: str, app_id: str, credentials: str, rendezvous: Mapping[str, str], name: str = "") -> None:
    """Store what a client needs to reach an app.

    Args:
        credentials: the text of its ``credentials.ClientCredentials``.
        rendezvous: the address of replica 0 of each role, by the role's name; the host may be ``@NAME``, which only the
            hosts can resolve.
        name: name of the app; empty if it is not known.

    Raises:
        OSError: the file cannot be written.
    """
    _files(scheduler).store(app_id, _StoredCredentials(name, credentials, dict(rendezvous)))


def load(scheduler: str, app_id: str) -> tuple[str, dict[str, str]]:
    """Return the credentials and addresses that ``keep`` has stored; empty if nothing usable is stored."""
    found = _files(scheduler).load(app_id)
    return (found.credentials, found.rendezvous) if found else ("", {})


def name_of(scheduler: str, app_id: str) -> str:
    """Return the name of a stored app; empty if it is not known."""
    found = _files(scheduler).load(app_id)
    return found.name if found else ""


def stored_apps() -> list[tuple[str, str]]:
    """List all stored apps as pairs of scheduler and app id; warn of folders that belong to another user."""
    found = []
    for scheduler in _ids_in(StoredApps(_StoredCredentials, _FOLDER)):
        found += [(scheduler, app_id) for app_id in _ids_in(_files(scheduler))]
    return found


def _ids_in(files: StoredApps[_StoredCredentials]) -> list[str]:
    try:
        return files.app_ids()
    except TorchXMonarchError as error:
        _log.warning("%s", error)
        return []


def forget(scheduler: str, app_id: str) -> None:
    """Remove the file of an app, if it exists."""
    _files(scheduler).remove(app_id)
