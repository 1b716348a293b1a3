# SPDX-License-Identifier: BSD-3-Clause
"""Cancel an app.

A signal to the batch step makes it stop the replicas within their grace period (see ``in_job.batch_step``). A job
without a batch step is cancelled by Slurm.
"""

from __future__ import annotations

import contextlib
import time

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.state import HOST_EXTRA
from torchx_monarch.backends.slurm import native, records, states
from torchx_monarch.backends.slurm.job_state import JobState
from torchx_monarch.backends.slurm.records import CancelRecord
from torchx_monarch.model.state import State

_CANCEL_EXTRA = 2 * HOST_EXTRA
"""Seconds beyond the grace period after which a second cancel is a plain scancel, which ignores the batch step."""


def cancel(app_id: str, job: JobState) -> None:
    """Request the cancellation of an app for which ``JobState.is_live`` is true, and return immediately.

    If job.json says that the job has ended, it does not use a plain scancel, which would change the job's state.

    Args:
        app_id: the job's id.
        job: its state.

    Raises:
        SlurmError: a command of Slurm's fails or cannot be run.
    """
    before = records.read(CancelRecord, job.folder.cancel, job.folder.trusted)
    with contextlib.suppress(OSError):  # the folder is on another machine: scancel works without it
        if before is None:
            state_files.write_json(job.folder.cancel, {"time": time.time()}, below=job.folder.trusted)
    grace = records.read_submission(job.folder).grace
    overdue = before is not None and time.time() > before.time + grace + _CANCEL_EXTRA
    if overdue or not _batch_runs(job) or not (native.signal_batch_step(app_id) or job.state.is_terminal):
        native.checked(["scancel", app_id])


def _batch_runs(job: JobState) -> bool:
    """Whether a batch step runs that can receive a signal: it has begun, and Slurm has not ended it."""
    if not job.components or states.to_state(job.components[0].state) is not State.RUNNING:
        return False
    return job.record is not None and not job.record.outside
