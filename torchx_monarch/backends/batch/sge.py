# SPDX-License-Identifier: BSD-3-Clause
"""Grid Engine: each role is an array job (written for release 8.1.9 of Son of Grid Engine)."""

from __future__ import annotations

import os
import xml.etree.ElementTree as xml
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchx_monarch.backends.batch.backend import BatchBackend, Job
from torchx_monarch.backends.batch.options import BatchOpts, clock, short_names, time_limit
from torchx_monarch.backends.batch.snapshot import QueuedJob
from torchx_monarch.backends.core.options import AvoidOpts
from torchx_monarch.model.state import State


@dataclass
class SgeOpts(AvoidOpts, BatchOpts):
    parallel_environment: str = "smp"
    """Parallel environment that gives a replica several CPUs of one machine."""

    memory_resource: str = "mem_free"
    """Resource by which a replica asks for memory; empty to ask for none."""

    gpu_resource: str = "gpu"
    """Resource by which a replica asks for GPUs."""


class SgeBackend(BatchBackend[SgeOpts]):
    options, name, install = SgeOpts, "sge", "Grid Engine's commands (Debian: gridengine-client)"
    array, first_task, cancel_command = "SGE_TASK_ID", 1, ("qdel",)

    def submit_command(self, job: Job, options: SgeOpts) -> Sequence[str]:
        words = ["qsub", "-terse", "-b", "y", "-V", "-r", "n", "-N", job.name, "-t", f"1-{job.tasks}"]
        words += ["-wd", os.path.dirname(job.output), "-j", "y", "-o", job.output]
        words += ["-q", options.queue] if options.queue else []
        words += ["-l", f"h_rt={clock(time_limit(options.time))}"] if options.time else []
        others = "|".join(f"{name}|{name}.*" for name in short_names(options.left_out))
        words += ["-l", f"hostname=!({others})"] if others else []
        words += ["-P", options.account] if options.account else []
        words += ["-pe", options.parallel_environment, str(job.cpu)] if job.cpu > 1 else []
        words += ["-l", f"{options.memory_resource}={job.memory}M"] if job.memory and options.memory_resource else []
        words += ["-l", f"{options.gpu_resource}={job.gpu}"] if job.gpu else []
        return [*words, *job.submit_args, *job.words]

    def queued(self) -> Mapping[str, QueuedJob]:
        jobs = {}
        for job in xml.fromstring(self.run(["qstat", "-xml", "-g", "d"])).iter("job_list"):  # -g d: each task by itself
            state = job.findtext("state", "")
            reason = "Grid Engine could not start it" if "E" in state else "it is held" if "h" in state else ""
            queued = QueuedJob(
                State.RUNNING if job.get("state") == "running" else State.PENDING,
                reason,
                is_stuck="E" in state,
                name=job.findtext("JB_name", ""),
            )
            jobs[f"{job.findtext('JB_job_number')}.{job.findtext('tasks')}"] = queued
        return jobs
