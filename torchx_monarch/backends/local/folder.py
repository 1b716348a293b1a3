# SPDX-License-Identifier: BSD-3-Clause
"""Remove and prune the folders of apps: other processes see all of a folder or nothing."""

from __future__ import annotations

import contextlib
import os
import time

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.state_files import AppPaths
from torchx_monarch.backends.local import state
from torchx_monarch.system import run_dirs

TRASH_PREFIX = ".trash-"

KEEP_APPS = 1000

_WORK_TIME = 3600.0
"""Seconds for which a half-made or half-removed folder is kept: another process may still work on it."""


def remove_app(paths: AppPaths) -> None:
    """Remove an app's folder with its content; other processes see all of it or nothing."""
    trash = os.path.join(os.path.dirname(paths.root), f"{TRASH_PREFIX}{os.getpid()}-{paths.app_id}")
    try:
        os.rename(paths.root, trash)
    except FileNotFoundError:
        return
    run_dirs.remove_tree(trash)


def make_run_dir(paths: AppPaths) -> str:
    """Return the folder for the app's sockets: inside the app's folder, or elsewhere if that path is too long."""
    return paths.run if len(os.fsencode(paths.run)) <= run_dirs.MAX_RUN_DIR else run_dirs.new_run_dir()


def remove_run_dir(paths: AppPaths, run_dir: str) -> None:
    """Remove a folder that ``make_run_dir`` has returned; leave any other folder alone."""
    if run_dir == paths.run or os.path.basename(run_dir).startswith(run_dirs.RUN_PREFIX):
        run_dirs.remove_tree(run_dir)


def describe_full_disk(paths: AppPaths) -> str:
    """Describe a full state directory, for which files that name the cause may be missing; empty if it has room."""
    with contextlib.suppress(OSError):
        found = os.statvfs(paths.root)
        if found.f_blocks and not found.f_bavail:
            return f"the disk of {paths.root} is full, so details may be missing"
        if found.f_files and not found.f_favail:
            return f"the file system of {paths.root} has no inodes left, so details may be missing"
    return ""


def keep_apps() -> int:
    """Return the number of ended apps to keep."""
    with contextlib.suppress(ValueError):
        return max(0, int(os.environ["MONARCH_KEEP_APPS"])) if "MONARCH_KEEP_APPS" in os.environ else KEEP_APPS
    return KEEP_APPS


def prune(apps: str, *, newest: int | None = None) -> list[str]:
    """Remove apps that ended long ago, or before the newest that are kept, and folders half made or half removed.

    Args:
        newest: how many ended apps are kept; None for ``keep_apps``.

    Returns:
        The ids of the removed apps.
    """
    oldest_end = time.time() - state_files.keep_days() * 86400
    ended: list[tuple[float, state_files.AppPaths]] = []
    with os.scandir(apps) as entries:
        for entry in entries:
            paths, is_trash = state_files.AppPaths(entry.path), entry.name.startswith(TRASH_PREFIX)
            with contextlib.suppress(state_files.DamagedFileError, OSError):
                record = None if is_trash else state.current_state(paths)
                if record is not None and record.terminal and record.ended is not None:
                    ended.append((record.ended, paths))
                # The record of an app of another machine may be unreadable for a moment (NFS): it has a supervisor.
                has_begun = os.path.exists(paths.lock) and not os.path.exists(paths.supervisor)
                is_left = is_trash or (record is None and has_begun and not state.is_supervised(paths))
                if is_left and entry.stat().st_mtime < time.time() - _WORK_TIME:
                    run_dirs.remove_tree(entry.path)
    newest = keep_apps() if newest is None else newest
    ended.sort(key=lambda ended_app: ended_app[0], reverse=True)
    removed = []
    for rank, (end, paths) in enumerate(ended):
        if (rank >= newest or end < oldest_end) and not state.is_supervised(paths):
            state.remove_ended(paths)
            removed.append(paths.app_id)
    return removed
