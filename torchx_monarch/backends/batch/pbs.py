# SPDX-License-Identifier: BSD-3-Clause
"""OpenPBS and PBS Professional: each replica is a job (written for release 23.06 of OpenPBS)."""

from __future__ import annotations

import getpass
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchx_monarch.backends.batch.backend import BatchBackend, Job
from torchx_monarch.backends.batch.options import BatchOpts, clock, time_limit
from torchx_monarch.backends.batch.snapshot import QueuedJob
from torchx_monarch.model.state import State

_STARTED = "RESU"
"""The states Running, Exiting, and Suspended by PBS or by a workstation's User; in others a job waits."""


@dataclass
class PbsOpts(BatchOpts):
    gpu_resource: str = "ngpus"
    """Resource by which a replica asks for GPUs."""


class PbsBackend(BatchBackend[PbsOpts]):
    """PBS's commands. Not a job array: that has two tasks at least."""

    options, name, install = PbsOpts, "pbs", "PBS's commands (OpenPBS: openpbs-client)"
    cancel_command = ("qdel",)

    def submit_command(self, job: Job, options: PbsOpts) -> Sequence[str]:
        chunk = f"select=1:ncpus={job.cpu or 1}"
        chunk += f":mem={job.memory}mb" if job.memory else ""
        chunk += f":{options.gpu_resource}={job.gpu}" if job.gpu else ""
        words = ["qsub", "-V", "-N", job.name, "-l", chunk, "-j", "oe", "-o", job.output]
        words += ["-q", options.queue] if options.queue else []
        words += ["-l", f"walltime={clock(time_limit(options.time))}"] if options.time else []
        words += ["-A", options.account] if options.account else []
        return [*words, *job.submit_args, "--", *job.words]

    def find_job(self, name: str, queued: Mapping[str, QueuedJob]) -> str:
        return self.run(["qselect", "-N", name]).partition(".")[0]  # qstat cuts names

    def queued(self) -> Mapping[str, QueuedJob]:
        jobs, job_id = {}, ""
        # -w: wide, so that ids are not cut; -s: below each job a line with its comment, indented. JSON (-f -F) has the
        # environments of the jobs, and those of all users.
        for line in self.run(["qstat", "-u", getpass.getuser(), "-w", "-s"]).splitlines():
            if line[:1].isdigit() and len(words := line.split()) == 11:
                job_id = words[0].partition(".")[0]
                jobs[job_id] = QueuedJob(State.RUNNING if words[9] in _STARTED else State.PENDING)
            elif job_id in jobs and jobs[job_id].state is State.PENDING and (comment := line.strip(" -")):
                jobs[job_id] = QueuedJob(State.PENDING, comment, is_stuck="Can Never Run" in comment)
        return jobs
