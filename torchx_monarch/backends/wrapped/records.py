# SPDX-License-Identifier: BSD-3-Clause
"""Store what a wrapped scheduler does not: the app as the user wrote it, and the key of its hosts' results.

Until it is deleted, each app has a file of mode 0600 below the submitter's state directory: ``wrapped/SCHEDULER/APP``.
"""

from __future__ import annotations

import logging
import os
import urllib.parse
from dataclasses import asdict, dataclass, field
from typing import Any

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.errors import StateAccessError

_log = logging.getLogger("torchx_monarch")

_FOLDER = "wrapped"


@dataclass(frozen=True)
class Record:
    """What is stored of an app.

    Attributes:
        submitted: ``SubmittedApp.to_json``.
        created: when it was submitted, in seconds since the epoch.
        result_key: the key with which its hosts sign their results in the log (``system.signed_line``).
        cancelled: whether its scheduler was asked to cancel it.
    """

    submitted: dict[str, Any] = field(default_factory=dict)
    created: float = 0.0
    result_key: str = ""
    cancelled: bool = False


class AppRecords:
    """The records of one scheduler's apps.

    Args:
        scheduler: the name under which it is registered.
    """

    def __init__(self, scheduler: str) -> None:
        self._scheduler = scheduler

    def path(self, app_id: str) -> str:
        """Return the path of an app's file."""
        return os.path.join(self._folder(), urllib.parse.quote(app_id, safe=""))

    def _folder(self) -> str:
        return os.path.join(state_files.state_dir(), _FOLDER, self._scheduler)

    def write(self, app_id: str, record: Record) -> None:
        """Store the record of an app.

        Raises:
            OSError: it cannot be written, or the folder belongs to another user.
        """
        state_files.make_folder(_FOLDER, self._scheduler)
        state_files.write_json(self.path(app_id), asdict(record), below=state_files.state_dir())

    def read(self, app_id: str) -> Record | None:
        """Return the record of an app; None without one, or if it must not or cannot be used."""
        try:
            return state_files.load(Record, self.path(app_id), state_files.state_dir())
        except state_files.DamagedFileError as error:
            _log.warning("the record of %s is not used: %s", app_id, error)
            return None

    def app_ids(self) -> list[str]:
        """Return the ids of all apps that have a record.

        Raises:
            StateAccessError: another user owns the state directory, or it cannot be read.
        """
        try:
            return state_files.stored_ids(self._folder())
        except OSError as error:
            raise StateAccessError.of(error, self._folder()) from None

    def remove(self, app_id: str) -> None:
        """Remove the record of an app, if there is one."""
        state_files.remove_file(self.path(app_id))
