# SPDX-License-Identifier: BSD-3-Clause
"""Store the certificates with which the submitting machine reaches a job over the network (``controller.run_queue``).

Each app has one file of mode 0600 below the state directory (``state_files``):
``clients/SCHEDULER/APP``. It exists until the app is deleted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import urllib.parse
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from torchx_monarch.backends.core import state_files

_log = logging.getLogger("torchx_monarch")

_FOLDER = "clients"


@dataclass
class _StoredCredentials:
    """The content of the file: the arguments of ``keep`` with the same names."""

    name: str = ""
    credentials: str = ""
    rendezvous: dict[str, str] = field(default_factory=dict)


def path(scheduler: str, app_id: str) -> str:
    """Return the path of an app's file."""
    return os.path.join(state_files.state_dir(), _FOLDER, scheduler, urllib.parse.quote(app_id, safe=""))


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
    where = path(scheduler, app_id)
    state_files.make_folder(_FOLDER, scheduler)
    stored = _StoredCredentials(name, credentials, dict(rendezvous))
    state_files.write_json(where, asdict(stored), below=state_files.state_dir())


def load(scheduler: str, app_id: str) -> tuple[str, dict[str, str]]:
    """Return the credentials and addresses that ``keep`` has stored; empty if nothing usable is stored."""
    try:
        found = state_files.load(_StoredCredentials, path(scheduler, app_id), state_files.state_dir())
    except state_files.DamagedFileError as error:
        _log.warning("the certificate of %s is not used: %s", app_id, error)
        found = None
    return (found.credentials, found.rendezvous) if found else ("", {})


def name_of(scheduler: str, app_id: str) -> str:
    """Return the name of a stored app; empty if it is not known."""
    with contextlib.suppress(state_files.DamagedFileError):
        found = state_files.load(_StoredCredentials, path(scheduler, app_id), state_files.state_dir())
        return found.name if found else ""
    return ""


def stored_apps() -> list[tuple[str, str]]:
    """List all stored apps as pairs of scheduler and app id; warn of folders that belong to another user."""
    root = os.path.join(state_files.state_dir(), _FOLDER)
    found = []
    for scheduler in _ids_in(root):
        found += [(scheduler, app_id) for app_id in _ids_in(os.path.join(root, scheduler))]
    return found


def _ids_in(folder: str) -> list[str]:
    try:
        return sorted(state_files.stored_ids(folder))
    except OSError as error:
        _log.warning("the certificates in %s are not used: %s", folder, error)
        return []


def forget(scheduler: str, app_id: str) -> None:
    """Remove the file of an app, if it exists."""
    state_files.remove_file(path(scheduler, app_id))
