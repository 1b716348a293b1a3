# SPDX-License-Identifier: BSD-3-Clause
"""Remove old apps.

The rule: an app that has ended is removed when its end is more than 14 days ago (``MONARCH_KEEP_DAYS`` sets another
number of days), or when 1000 apps ended after it (``MONARCH_KEEP_APPS`` sets another number of apps). An app that has
not ended is never removed, nor is one whose owners live although its status file says that it has ended. The keeper of
each app applies the rule after its app has ended, so no command waits for it.
"""

from __future__ import annotations

import contextlib
import os
import time

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.local import folder, owners, state
from torchx_monarch.system import run_dirs

KEEP_APPS = 1000

#: Seconds for which a half-made or half-removed folder is kept, because another process may still work on it.
_WORK_TIME = 3600.0


def keep_apps() -> int:
    """Return the number of ended apps to keep."""
    with contextlib.suppress(ValueError):
        return max(0, int(os.environ["MONARCH_KEEP_APPS"])) if "MONARCH_KEEP_APPS" in os.environ else KEEP_APPS
    return KEEP_APPS


def prune(apps: str, *, days: float | None = None, newest: int | None = None) -> list[str]:
    """Apply the rule to the folder of all apps.

    Args:
        apps: that folder.
        days: for how many days an ended app is kept; None for ``state_files.keep_days``.
        newest: how many ended apps are kept; None for ``keep_apps``.

    Returns:
        The ids of the removed apps.
    """
    oldest_end = time.time() - (state_files.keep_days() if days is None else days) * 86400
    ended: list[tuple[float, state_files.AppPaths]] = []
    with os.scandir(apps) as entries:
        for entry in entries:
            if entry.name.startswith((folder.STAGING_PREFIX, folder.TRASH_PREFIX)):
                with contextlib.suppress(OSError):
                    if entry.stat().st_mtime < time.time() - _WORK_TIME:
                        run_dirs.remove_tree(entry.path)
                continue
            paths = state_files.AppPaths(entry.path)
            with contextlib.suppress(state_files.DamagedFileError, OSError):
                record = state.current_state(paths)
                if record is not None and record.terminal and record.ended is not None:
                    ended.append((record.ended, paths))
    newest = keep_apps() if newest is None else newest
    ended.sort(key=lambda ended_app: ended_app[0], reverse=True)
    removed = []
    for rank, (end, paths) in enumerate(ended):
        if (rank >= newest or end < oldest_end) and not owners.are_alive(paths):
            state.remove_ended(paths)
            removed.append(paths.app_id)
    return removed
