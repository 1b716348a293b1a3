# SPDX-License-Identifier: BSD-3-Clause
"""The exceptions of schedulers and backends, which the torchx command shows without a traceback.

``torchx_monarch.exceptions`` shows all exceptions of this package.
"""

from __future__ import annotations

from typing import TypeVar

from torchx.specs.finder import ComponentValidationException

from torchx_monarch.backends.core import state_files
from torchx_monarch.exceptions import TorchXMonarchError
from torchx_monarch.system.untrusted_text import one_line


class UserError(TorchXMonarchError, ComponentValidationException, ValueError):  # type: ignore[misc]
    """Raised when a request is impossible or names something that does not exist."""


class BackendError(TorchXMonarchError, ComponentValidationException, RuntimeError):  # type: ignore[misc]
    """Raised when the place where apps run is missing, does not answer, or refuses a request."""


class MissingClientError(BackendError, ModuleNotFoundError):
    """Raised when the client library that a backend needs is not installed.

    It is a ``ModuleNotFoundError`` because ``torchx runopts`` goes on with the next scheduler after one.
    """


class RemoveError(BackendError):
    """Raised when the folder of an app cannot be removed; the app is kept.

    Args:
        folder: its folder, shown if ``error`` names no file.
    """

    def __init__(self, app_id: str, folder: str, error: OSError) -> None:
        where = one_line(str(error.filename or folder))
        super().__init__(f"app {app_id} cannot be deleted: {where}: {error.strerror or error}")


class SubmitError(BackendError):
    """Raised when an app could not be started; nothing is left of it."""


P = TypeVar("P", bound="_PathError")


class _PathError(BackendError):
    """An error about a file or folder.

    Attributes:
        path: the file or folder.
        reason: what is wrong with it.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    @classmethod
    def from_os_error(cls: type[P], error: OSError, path: str) -> P:
        """Build the error from an error of the system.

        Args:
            path: the path in use, shown if ``error`` names none.
        """
        return cls(str(error.filename or path), error.strerror or str(error))


class StateDirError(SubmitError, _PathError):
    """Raised when the state directory cannot be written."""

    def __str__(self) -> str:
        return (
            f"cannot write the state of the app to {one_line(self.path)}: {self.reason}. "
            "Set MONARCH_STATE_DIR to a folder on this machine that you can write to."
        )


class StateAccessError(_PathError):
    """Raised when this user must not use a part of the state directory."""

    def __str__(self) -> str:
        reason = self.reason if self.reason.startswith(("is ", "belongs ")) else f"cannot be read: {self.reason}"
        own = state_files.state_dir()
        if self.path == own:
            return f"{one_line(self.path)} {reason}. Set MONARCH_STATE_DIR to a folder that belongs to you"
        return (
            f"{one_line(self.path)} {reason}. The state of your own jobs is in {own}; "
            "MONARCH_STATE_DIR sets another folder, which must belong to you"
        )
