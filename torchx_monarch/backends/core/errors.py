# SPDX-License-Identifier: BSD-3-Clause
"""The exceptions of schedulers and backends, which the torchx command shows without a traceback.

``torchx_monarch.exceptions`` shows all exceptions of this package.
"""

from __future__ import annotations

from torchx.specs.finder import ComponentValidationException

from torchx_monarch.exceptions import TorchXMonarchError
from torchx_monarch.system.untrusted_text import one_line


class UserError(TorchXMonarchError, ComponentValidationException, ValueError):  # type: ignore[misc]
    """Raised when a request is impossible or names something that does not exist."""


class SubmittedAlreadyError(UserError):
    """Raised when one dry run is submitted a second time, though each app has its id from its dry run."""

    def __init__(self, app_id: str) -> None:
        super().__init__(f"this request was submitted already, as {app_id}; another job needs another dry run")


class BackendError(TorchXMonarchError, ComponentValidationException, RuntimeError):  # type: ignore[misc]
    """Raised when the place where apps run is missing, does not answer, or refuses a request."""


class MissingClientError(BackendError, ModuleNotFoundError):
    """Raised when the client library that a backend needs is not installed.

    It is a ``ModuleNotFoundError`` because ``torchx runopts`` goes on with the next scheduler after one.
    """


class RemoveError(BackendError):
    """Raised when the folder of an app cannot be removed; the app is kept."""

    def __init__(self, app_id: str, folder: str, error: OSError) -> None:
        super().__init__(f"app {app_id} cannot be deleted: {_describe(error, folder)}")


class SubmitError(BackendError):
    """Raised when an app could not be started; nothing is left of it."""


class StateDirError(SubmitError):
    """Raised when the state directory cannot be written; ``path`` is shown if the system's error names none."""

    def __init__(self, error: OSError, path: str) -> None:
        advice = "Set MONARCH_STATE_DIR to a folder on this machine that you can write to."
        super().__init__(f"cannot write the state of the app to {_describe(error, path)}. {advice}")


class StateAccessError(BackendError):
    """Raised when this user must not use a part of the state directory; ``path`` as for ``StateDirError``."""

    def __init__(self, error: OSError, path: str) -> None:
        super().__init__(f"{_describe(error, path)}. Set MONARCH_STATE_DIR to a folder that belongs to you")


def _describe(error: OSError, path: str) -> str:
    return f"{one_line(str(error.filename or path))}: {error.strerror or error}"
