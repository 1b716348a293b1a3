# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How the wish to end an app reaches it.

The batch step is told, which has the replicas stop with their grace (see ``job``); what has none yet, Slurm ends.
"""

from __future__ import annotations

import contextlib
import os
import time

from torchx.specs import AppState

from torchx_monarch.backends.local import store
from torchx_monarch.backends.slurm import array, commands
from torchx_monarch.backends.slurm import folder as folders
from torchx_monarch.backends.slurm.truth import Known

_CANCEL_EXTRA = 20.0
"""Seconds beyond the grace after which a second wish to cancel is Slurm's own, which waits for nothing of ours."""


def cancel(app_id: str, app: Known) -> None:
    """Ask for the end of an app that has not ended, and return at once.

    Args:
        app_id: of a job, an array, or one of its tasks.
        app: what is known of it.

    Raises:
        SlurmError: Slurm cannot be asked, or refuses.
    """
    before = folders.read(app.folder.cancel)
    with contextlib.suppress(OSError):  # another machine's folder: Slurm knows all the same
        if not before:
            if os.path.isdir(app.folder.whole.root):
                os.makedirs(app.folder.root, mode=0o700, exist_ok=True)  # an array task's, which may not have begun
            store.write_json(app.folder.cancel, {"time": time.time()})
    grace = float(folders.read(app.folder.request).get("grace", 0.0))
    overdue = bool(before) and time.time() > before["time"] + grace + _CANCEL_EXTRA
    left = [index for index, task in app.tasks.items() if not task.terminal]
    told = [] if overdue else [index for index in left if _batch_runs(app.tasks[index])]
    if not told:
        if app.tasks or overdue or not _batch_runs(app) or not commands.tell_batch(app_id):
            commands.checked(["scancel", app_id])
        return
    # First those that wait: while there are any, Slurm is slow to signal the others (see commands).
    if len(told) < len(left):
        commands.checked(["scancel", array.names(app_id, [index for index in left if index not in told])])
    if not commands.tell_batch(array.names(app_id, told)):  # one of them has ended meanwhile, perhaps
        for name in [f"{app_id}_{index}" for index in told]:
            if not commands.tell_batch(name):
                commands.run(["scancel", name])


def _batch_runs(app: Known) -> bool:
    return app.state is AppState.RUNNING and bool(app.record) and "ended" not in app.record
