# SPDX-License-Identifier: BSD-3-Clause
"""The request to end an app: cancel.json in its folder, which ``torchx cancel`` writes and the supervisor reads.

The first outcome counts, and the shortest grace period. PENDING: the app goes back into the queue of a batch system.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.snapshot import Outcome
from torchx_monarch.backends.core.state_files import AppPaths


def load(paths: AppPaths) -> Outcome | None:
    """Read the request to end an app; return None if there is none."""
    return state_files.load_undamaged(Outcome, paths.cancel, paths.trusted)


def load_outcome(paths: AppPaths) -> Outcome | None:
    """Read how an app was asked to end; return None if it was not, or goes back into the queue."""
    stop = load(paths)
    return stop if stop and stop.state.is_terminal else None


def write(paths: AppPaths, outcome: Outcome, grace: float | None) -> None:
    """Write the request to end an app; arguments as for ``Backend.stop``."""
    asked = load(paths)
    if asked is None or not asked.state.is_terminal:
        asked = replace(outcome, time=outcome.time or time.time(), grace=grace)
    elif grace is not None and (asked.grace is None or grace < asked.grace):
        asked = replace(asked, grace=grace)
    else:
        return
    state_files.write_json(paths.cancel, asdict(asked), below=paths.trusted)
