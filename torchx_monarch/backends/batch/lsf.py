# SPDX-License-Identifier: BSD-3-Clause
"""IBM Spectrum LSF: each role is a job array (written for release 10.1)."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchx_monarch.backends.batch.backend import BatchBackend, Job
from torchx_monarch.backends.batch.options import BatchOpts, clock, time_limit
from torchx_monarch.backends.batch.snapshot import QueuedJob
from torchx_monarch.backends.core.errors import BackendError
from torchx_monarch.backends.core.options import AvoidOpts
from torchx_monarch.model.state import State


@dataclass
class LsfOpts(AvoidOpts, BatchOpts):
    """Run options of monarch_lsf."""


class LsfBackend(BatchBackend[LsfOpts]):
    options, name, install = LsfOpts, "lsf", "LSF's commands, or source its profile.lsf"
    array, first_task, cancel_command = "LSB_JOBINDEX", 1, ("bkill",)
    job_id = r"Job <(\d+)>"
    unknown_job = "(?i)already finished|no matching job|not found"

    def submit_command(self, job: Job, options: LsfOpts) -> Sequence[str]:
        words = ["bsub", "-J", f"{job.name}[1-{job.tasks}]", "-o", job.output]
        words += ["-q", options.queue] if options.queue else []
        words += ["-n", str(job.cpu), "-R", "span[hosts=1]"] if job.cpu > 1 else []
        words += ["-R", f"rusage[mem={job.memory}MB]"] if job.memory else []
        words += ["-gpu", f"num={job.gpu}"] if job.gpu else []
        words += ["-W", clock(time_limit(options.time) + 59)[:-3]] if options.time else []  # in whole minutes
        is_other = " && ".join(f"hname!='{node}'" for node in options.left_out)
        words += ["-R", f"select[{is_other}]"] if is_other else []
        words += ["-P", options.account] if options.account else []
        return [*words, *job.submit_args, shlex.join(job.words)]  # a shell gets the command

    def cancel(self, jobs: Sequence[str]) -> None:
        super().cancel([re.sub(r"\.(\d+)$", r"[\1]", job) for job in jobs])

    def queued(self) -> Mapping[str, QueuedJob]:
        try:
            answer = self.run(["bjobs", "-json", "-o", "jobid jobindex stat job_name pend_reason"])
        except BackendError as error:  # the code of an empty answer depends on LSB_BJOBS_CONSISTENT_EXIT_CODE
            if "No unfinished job" not in str(error):
                raise
            return {}
        jobs = {}
        for job in json.loads(answer[answer.find("{") :])["RECORDS"] if "{" in answer else ():
            state = State.PENDING if job["STAT"] in ("PEND", "PSUSP", "WAIT") else State.RUNNING
            reason = " ".join(job.get("PEND_REASON", "").split()) if state is State.PENDING else ""
            name = job["JOB_NAME"].partition("[")[0]
            jobs[f"{job['JOBID']}.{job['JOBINDEX']}"] = QueuedJob(state, reason, "never satisfied" in reason, name)
        return jobs
