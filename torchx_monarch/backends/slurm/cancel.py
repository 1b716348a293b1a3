# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Cancel an app.

A signal to the batch step makes it stop the replicas within their grace period (see ``batch_step``). A job or an array
task without a batch step is cancelled by Slurm.
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
"""Seconds beyond the grace period after which a second cancel is a plain scancel, which ignores the batch step."""


def is_needed(app: SlurmSnapshot) -> bool:
    """Whether an app must be cancelled: it has not ended, or Slurm reports that it runs.

    If job.json says that the app has ended but Slurm reports that it runs, the job is about to exit or the file is
    wrong. ``cancel`` then signals the batch step but does not use a plain scancel, which would change the job's state.
    """
    return not app.terminal or app.runs_in_slurm or any(is_needed(task) for task in app.tasks.values())


def cancel(app_id: str, app: SlurmSnapshot) -> None:
    """Request the cancellation of an app for which ``is_needed`` is true, and return immediately.

    Args:
        app_id: the id of a job, an array or an array task.
        app: its snapshot.

    Raises:
        SlurmError: a command of Slurm's fails or cannot be run.
    """
    before = records.read(CancelRecord, app.folder.cancel)
    with contextlib.suppress(OSError):  # the folder is on another machine: scancel works without it
        if before is None:
            if os.path.isdir(app.folder.whole.root):
                os.makedirs(app.folder.root, mode=0o700, exist_ok=True)  # array tasks get a folder when they begin
            state_files.write_json(app.folder.cancel, {"time": time.time()})
    submission = records.read(Submission, app.folder.request)
    grace = submission.grace if submission else 0.0
    overdue = before is not None and time.time() > before.time + grace + _CANCEL_EXTRA
    left = [index for index, task in app.tasks.items() if is_needed(task)]
    told = [] if overdue else [index for index in left if _batch_runs(app.tasks[index])]
    if not told:
        heard = (
            not app.tasks and not overdue and _batch_runs(app) and (commands.signal_batch_step(app_id) or app.terminal)
        )
        if not heard:
            commands.checked(["scancel", app_id])
        return
    # Cancel waiting array tasks first: while any wait, Slurm is slow to signal the others (commands._TOLD_WITHIN).
    if len(told) < len(left):
        commands.checked(["scancel", array.names(app_id, [index for index in left if index not in told])])
    if not commands.signal_batch_step(array.names(app_id, told)):  # one of them may have ended meanwhile
        for index in told:
            name = f"{app_id}_{index}"
            if not commands.signal_batch_step(name) and not app.tasks[index].terminal:
                commands.run(["scancel", name])


def _batch_runs(app: SlurmSnapshot) -> bool:
    """Whether a batch step runs that can receive a signal: it has begun, and Slurm has not ended it."""
    if not app.components or states.app_state(app.components[0].state) is not AppState.RUNNING:
        return False
    return bool(app.damage) or (app.record is not None and not app.record.outside)
