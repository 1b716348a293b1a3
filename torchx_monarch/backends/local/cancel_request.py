# SPDX-License-Identifier: BSD-3-Clause
"""The request to end an app: cancel.json in its folder, which ``torchx cancel`` writes and the supervisor reads."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from torchx_monarch.backends.core import state_files


@dataclass
class CancelRequest:
    """The content of cancel.json.

    Attributes:
        grace: seconds from SIGTERM to SIGKILL; None for the app's own run option.
    """

    grace: float | None = None


def write(paths: state_files.AppPaths, request: CancelRequest) -> None:
    """Write the request to end an app.

    Raises:
        OSError: it cannot be written.
    """
    state_files.write_json(paths.cancel, asdict(request), below=paths.trusted)


def load(paths: state_files.AppPaths) -> CancelRequest | None:
    """Read the request to end an app; return None if none was written."""
    return state_files.load(CancelRequest, paths.cancel, paths.trusted)
