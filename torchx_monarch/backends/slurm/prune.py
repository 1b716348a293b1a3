# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which folders of old jobs are removed.

The rule: a folder is removed when its job has ended and nothing was written to it for 14 days (``MONARCH_KEEP_DAYS``
sets another number of days). Whoever submits a job applies the rule afterwards. Folders that the run option ``job_dir``
has put elsewhere are their owner's; a job of which nobody knows that it has ended keeps its folder.
"""

from __future__ import annotations

import contextlib
import os
import time

from torchx_monarch.backends.local.prune import keep_days
from torchx_monarch.backends.slurm import folder, records, snapshot
from torchx_monarch.backends.slurm.commands import SlurmError
from torchx_monarch.backends.slurm.folder import JobFolder
from torchx_monarch.backends.slurm.records import EndRecord

_ASKED = 10
"""Jobs of which Slurm is asked at a time: those that ended when nobody was there to see it."""


def prune(*, days: float | None = None) -> list[str]:
    """Apply the rule to this state directory.

    Returns:
        The folders that were removed.
    """
    oldest = time.time() - (keep_days() if days is None else days) * 86400
    ids = {paths.root: app_id for app_id, paths in folder.known().items()}
    removed, asked = [], 0
    for root in _older(folder.jobs_dir(), oldest):
        paths = JobFolder(root)
        ended = records.read(EndRecord, paths.end) is not None or folder.TRASH in os.path.basename(root)
        if not ended and root in ids and asked < _ASKED:
            asked += 1
            with contextlib.suppress(SlurmError):
                app = snapshot.look(ids[root])
                ended = app is not None and app.folder.root == root and app.terminal
        if ended:
            folder.remove(root)
            removed.append(root)
    for link in _older(folder.ids_dir(), oldest):
        if not os.path.exists(link):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(link)
    return removed


def _older(path: str, than: float) -> list[str]:
    """What is in a folder and was not changed since then."""
    found = []
    with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.stat(follow_symlinks=False).st_mtime < than:
                    found.append(entry.path)
    return sorted(found)
