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

from torchx_monarch.backends.local import state_files
from torchx_monarch.backends.slurm import array, commands, records, states
from torchx_monarch.backends.slurm.job_status import SlurmSnapshot
from torchx_monarch.backends.slurm.records import CancelRecord, Submission

_CANCEL_EXTRA = 20.0
"""Seconds beyond the grace after which a second wish to cancel is Slurm's own, which waits for nothing of ours."""


def is_needed(app: SlurmSnapshot) -> bool:
    """Whether an app is to be told to end: unless it has ended, and Slurm does not state that it runs.

    One whose job.json states its end, and of which Slurm states that it runs, is about to leave, or the file is wrong:
    its batch step is told, but Slurm is not made to end it, for that would change how it has ended.
    """
    return not app.terminal or app.runs_in_slurm or any(is_needed(task) for task in app.tasks.values())


def cancel(app_id: str, app: SlurmSnapshot) -> None:
    """Ask for the end of an app that ``is_needed``, and return at once.

    Args:
        app_id: of a job, an array, or one of its tasks.
        app: what is known of it.

    Raises:
        SlurmError: Slurm cannot be asked, or refuses.
    """
    before = records.read(CancelRecord, app.folder.cancel)
    with contextlib.suppress(OSError):  # another machine's folder: Slurm knows all the same
        if before is None:
            if os.path.isdir(app.folder.whole.root):
                os.makedirs(app.folder.root, mode=0o700, exist_ok=True)  # an array task's, which may not have begun
            state_files.write_json(app.folder.cancel, {"time": time.time()})
    submission = records.read(Submission, app.folder.request)
    grace = submission.grace if submission else 0.0
    overdue = before is not None and time.time() > before.time + grace + _CANCEL_EXTRA
    left = [index for index, task in app.tasks.items() if is_needed(task)]
    told = [] if overdue else [index for index in left if _batch_runs(app.tasks[index])]
    if not told:
        heard = not app.tasks and not overdue and _batch_runs(app) and (commands.tell_batch(app_id) or app.terminal)
        if not heard:
            commands.checked(["scancel", app_id])
        return
    # First those that wait: while there are any, Slurm is slow to signal the others (see commands).
    if len(told) < len(left):
        commands.checked(["scancel", array.names(app_id, [index for index in left if index not in told])])
    if not commands.tell_batch(array.names(app_id, told)):  # one of them has ended meanwhile, perhaps
        for index in told:
            name = f"{app_id}_{index}"
            if not commands.tell_batch(name) and not app.tasks[index].terminal:
                commands.run(["scancel", name])


def _batch_runs(app: SlurmSnapshot) -> bool:
    """Whether a batch step hears the wish: it has begun, and Slurm has not ended it."""
    if not app.components or states.app_state(app.components[0].state) is not AppState.RUNNING:
        return False
    return bool(app.damage) or (app.record is not None and not app.record.outside)
