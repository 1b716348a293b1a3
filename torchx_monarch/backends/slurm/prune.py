# SPDX-License-Identifier: BSD-3-Clause
"""Remove the folders of old jobs.

A folder is removed when its job has ended and nothing was written to it for 14 days (``MONARCH_KEEP_DAYS`` sets another
number of days). Each submission prunes afterwards. Folders that the run option ``job_dir`` puts elsewhere are never
removed. A job keeps its folder until its end is known, from the batch step's record or from Slurm.
"""

from __future__ import annotations

import contextlib
import os
import time

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.slurm import folder, job_state, snapshot
from torchx_monarch.backends.slurm.folder import JobFolder
from torchx_monarch.backends.slurm.native import SlurmError

_ASKED = 10
"""The most jobs per call for which Slurm is asked: they were killed before they recorded their end."""


def prune() -> None:
    """Remove the folders of old jobs, and old dangling links, in this state directory.

    Raises:
        OSError, StateAccessError: the state directory must not or cannot be used.
    """
    oldest = time.time() - state_files.keep_days() * 86400
    ids = {paths.root: app_id for app_id, paths in folder.job_folders().items()}
    asked = 0
    for root in _older(folder.jobs_dir(), oldest):
        paths = JobFolder(root)
        ended = job_state.has_recorded_end(paths) or folder.TRASH in os.path.basename(root)
        if not ended and root in ids and asked < _ASKED:
            asked += 1
            with contextlib.suppress(SlurmError, state_files.DamagedFileError):
                job = snapshot.state_of(ids[root])
                is_mine = job is not None and job.folder.root == root and not job.other_user
                ended = job is not None and is_mine and job.state.is_terminal
        if ended:
            folder.remove(root)
    for link in _older(folder.ids_dir(), oldest):
        if not os.path.exists(link):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(link)


def _older(path: str, than: float) -> list[str]:
    """Return the paths of a folder's entries last modified before ``than``, in seconds since the epoch.

    Raises:
        OSError: the folder must not or cannot be read (``state_files.names_in``).
    """
    found = []
    for entry in sorted(os.path.join(path, name) for name in state_files.names_in(path)):
        with contextlib.suppress(FileNotFoundError):
            if os.stat(entry, follow_symlinks=False).st_mtime < than:
                found.append(entry)
    return found
