# SPDX-License-Identifier: BSD-3-Clause
"""What the submitter's state directory keeps of an app: its machines. The handle alone is enough without it."""

from __future__ import annotations

import logging
import os
import urllib.parse
from dataclasses import asdict, dataclass

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.errors import StateAccessError

_log = logging.getLogger("torchx_monarch")


@dataclass(frozen=True)
class Layout:
    """Where an app runs.

    Attributes:
        machines: for each role the machines of its replicas.
        python: the interpreter of the machines; empty for the one by which they have run an app last.
        setup: the shell commands before it.
    """

    machines: list[list[str]]
    python: str = ""
    setup: str = ""

    @property
    def names(self) -> list[str]:
        """All machines, each once."""
        return list(dict.fromkeys(name for names in self.machines for name in names))


def _folder() -> str:
    return os.path.join(state_files.state_dir(), "ssh")


def _path(app_id: str) -> str:
    return os.path.join(_folder(), urllib.parse.quote(app_id, safe=""))


def keep(app_id: str, layout: Layout) -> None:
    """Store where an app runs.

    Raises:
        OSError: that cannot be written, or the folder belongs to another user.
    """
    state_files.make_folder("ssh")
    state_files.write_json(_path(app_id), asdict(layout), below=state_files.state_dir())


def load(app_id: str) -> Layout | None:
    """Return where an app runs; None if that is not stored, or must not be used."""
    try:
        return state_files.load(Layout, _path(app_id), state_files.state_dir())
    except state_files.DamagedFileError as error:
        _log.warning("the machines of %s are not used: %s", app_id, error)
        return None


def app_ids() -> list[str]:
    """Return the ids of all stored apps.

    Raises:
        StateAccessError: another user owns the state directory, or it cannot be read.
    """
    try:
        return state_files.stored_ids(_folder())
    except OSError as error:
        raise StateAccessError.of(error, _folder()) from None


def forget(app_id: str) -> None:
    """Remove what is stored of an app."""
    state_files.remove_file(_path(app_id))
