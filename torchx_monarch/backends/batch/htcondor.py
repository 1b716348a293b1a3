# SPDX-License-Identifier: BSD-3-Clause
"""HTCondor: each role is a cluster of jobs, on machines that share a file system (written for release 23)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchx_monarch.backends.batch.backend import BatchBackend, Job
from torchx_monarch.backends.batch.options import AccountOpts, short_names, time_limit
from torchx_monarch.backends.batch.snapshot import QueuedJob
from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.backends.core.options import AvoidOpts
from torchx_monarch.model.state import State


@dataclass
class HTCondorOpts(AvoidOpts, AccountOpts):
    """Run options of monarch_htcondor."""


class HTCondorBackend(BatchBackend[HTCondorOpts]):
    options, name, install = HTCondorOpts, "htcondor", "HTCondor's commands (Debian 13: htcondor)"
    array, cancel_command = "CONDOR_PROCESS", ("condor_rm",)
    job_id, unknown_job = r"(\d+)\.\d+ - ", "(?i)not found|couldn't find|no jobs"

    def submit_command(self, job: Job, options: HTCondorOpts) -> Sequence[str]:
        log = f"{job.output}.$(ProcId)"
        words = [f"batch_name={job.name}", f"executable={job.words[0]}", f"arguments={_quoted(job.words[1:])}"]
        # Without transfer of files only machines of the submitting one's FILESYSTEM_DOMAIN get the job.
        words += ["transfer_executable=False", "should_transfer_files=NO", f"output={log}", f"error={log}"]
        words += ["getenv=True", f'environment="{self.array}=$(ProcId)"']
        words += [f"allowed_job_duration={time_limit(options.time)}"] if options.time else []
        words += [f"accounting_group={options.account}"] if options.account else []
        if others := ",".join(short_names(options.left_out)):
            if any(re.match(r"\s*requirements\s*=", word, re.IGNORECASE) for word in job.submit_args):
                reason = f"would replace that of `avoid_known_bad`: leave out {others} there"
                raise UserError(f"`requirements` in run option `submit_args` {reason}")
            words.append(f'requirements=!stringListIMember(split(Machine,".")[0],"{others}")')
        amounts = {"cpus": job.cpu, "memory": job.memory, "gpus": job.gpu}
        words += [f"request_{name}={amount}" for name, amount in amounts.items() if amount]
        return ["condor_submit", "-terse", *words, *job.submit_args, "-queue", str(job.tasks)]

    def queued(self) -> Mapping[str, QueuedJob]:
        names = "ClusterId,ProcId,JobStatus,JobBatchName,HoldReason,HoldReasonCode,LastRejMatchReason"
        jobs = {}
        for job in json.loads(self.run(["condor_q", "-json", "-attributes", names]).strip() or "[]"):
            queued = QueuedJob()
            if job["JobStatus"] == 1:  # idle
                queued = QueuedJob(State.PENDING, job.get("LastRejMatchReason", "").strip())
            elif job["JobStatus"] == 5:  # held: by its user (codes 1 and 15), or after an error
                is_stuck = job.get("HoldReasonCode") not in (1, 15)
                queued = QueuedJob(State.PENDING, job.get("HoldReason", "it is held"), is_stuck)
            if job["JobStatus"] != 4:  # it has ended, and may stay in the queue
                jobs[f"{job['ClusterId']}.{job['ProcId']}"] = queued._replace(name=job.get("JobBatchName", ""))
        return jobs


def _quoted(words: Sequence[str]) -> str:
    """Quote arguments for condor_submit, to which ``$`` begins a macro."""
    text = " ".join("'" + word.replace("'", "''") + "'" if re.search(r"[\s']", word) else word for word in words)
    return '"' + text.replace('"', '""').replace("$", "$(DOLLAR)") + '"'
