# SPDX-License-Identifier: BSD-3-Clause
"""A scheduler for a batch system: task-spooler (``tsp``), a queue of one user on one machine, without array jobs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from torchx_monarch.backends.batch.backend import BatchBackend, Job
from torchx_monarch.backends.batch.options import SubmitOpts
from torchx_monarch.backends.batch.snapshot import QueuedJob
from torchx_monarch.model.state import State
from torchx_monarch.schedulers.monarch import MonarchScheduler, create


class TaskSpooler(BatchBackend[SubmitOpts]):
    """What tsp is told."""

    options, name, install = SubmitOpts, "task_spooler", "task-spooler"
    cancel_command = ("sh", "-c", 'for id; do tsp -r "$id" || tsp -k "$id"; done', "sh")
    unknown_job = "cannot be removed|not running|not finished|queue"

    def submit_command(self, job: Job, options: SubmitOpts) -> Sequence[str]:
        """Return the command that submits a job and prints its id."""
        return ["tsp", "-L", job.name, *job.submit_args, *job.words]

    def queued(self) -> Mapping[str, QueuedJob]:
        """Return the jobs that have not ended."""
        states = {"queued": State.PENDING, "allocating": State.PENDING, "running": State.RUNNING}
        rows = [line.split() for line in self.run(["tsp"]).splitlines()[1:]]
        return {row[0]: QueuedJob(states[row[1]]) for row in rows if row[1] in states}


def create_scheduler(session_name: str, **kwargs: object) -> MonarchScheduler:
    """Create the scheduler, which a package registers: ``torchx.schedulers: acme_tsp = MODULE:create_scheduler``."""
    return create("acme_tsp", session_name, TaskSpooler(), sys.executable)
