# SPDX-License-Identifier: BSD-3-Clause
"""Run Slurm's commands and parse their output.

The commands are asked for named fields, which are the same in all versions of Slurm; ``--json`` output differs.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence

from torchx_monarch.backends.batch import commands as batch_commands
from torchx_monarch.backends.batch.snapshot import QueuedJob
from torchx_monarch.backends.core.errors import BackendError
from torchx_monarch.model.env_names import JOB_VARIABLES
from torchx_monarch.model.state import State

_INSTALL = "Slurm's commands, as the login nodes of a cluster have them (Debian: slurm-client, Red Hat: slurm)"

_INHERITED = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")

_NOT_INHERITED = frozenset({*JOB_VARIABLES, "SBATCH_ARRAY_INX"})
"""Variables that are not passed on. SBATCH_ARRAY_INX would make the submitted job an array."""


_STATES = {
    State.PENDING: "CONFIGURING PENDING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT SUSPENDED",
    State.RUNNING: "COMPLETING RESIZING RUNNING SIGNALING STAGE_OUT STOPPED",
    State.SUCCEEDED: "COMPLETED",
    State.CANCELLED: "CANCELLED",
    State.FAILED: "BOOT_FAIL DEADLINE FAILED LAUNCH_FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED RECONFIG_FAIL REVOKED "
    "TIMEOUT",
}
"""Slurm's states for each of an app's (squeue(1), section JOB STATE CODES)."""


def environ() -> dict[str, str]:
    """Return the environment for Slurm's commands.

    Within a job, SLURM_* variables are left out: they describe that job, and sbatch would read them as options.
    """
    inside = "SLURM_JOB_ID" in os.environ
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _NOT_INHERITED
        and (not inside or not name.startswith(("SLURM_", "SLURMD_")) or name in _INHERITED)
    }


def run(command: Sequence[str]) -> str:
    """Run one of Slurm's commands; arguments, return and errors as for ``batch.commands.run``."""
    return batch_commands.run(command, environ(), _INSTALL)


_JOB_ID = re.compile(r"(\d+)(?:\+0+)?")
"""The id that squeue and sacct print for a job (``17``) or its first component (``15+0``), which runs the script; not
that of another component (``15+1``), nor that of tasks of an array (``3_7``), which is no job of ours."""


def listed_jobs() -> dict[str, QueuedJob]:
    """Return the jobs of this user from slurmctld, by id, without arrays."""
    return parse_jobs(
        run(["squeue", "--noheader", "--all", f"--user={os.getuid()}", "--states=all", "--format=%i|%T|%r"])
    )


def accounted_jobs(job_ids: Sequence[str]) -> dict[str, QueuedJob]:
    """Return jobs from the accounting database, by id; none without accounting."""
    if not job_ids:
        return {}
    which = f"--jobs={','.join(job_ids)}"
    with contextlib.suppress(BackendError):
        return parse_jobs(run(["sacct", "--noheader", "--parsable2", "--allocations", "--format=JobID,State", which]))
    return {}


def parse_jobs(text: str) -> dict[str, QueuedJob]:
    """Parse lines of ``ID|STATE|REASON``, of which the last may be missing."""
    jobs: dict[str, QueuedJob] = {}
    for line in text.splitlines():
        job_id, *fields = line.split("|", 2)
        found = _JOB_ID.fullmatch(job_id.strip())
        if found is not None and fields:
            jobs.setdefault(found[1], _job(*(field.strip() for field in fields)))
    return jobs


def _job(shown: str, reason: str = "") -> QueuedJob:
    """Return a job by its state, which may be shown as ``CANCELLED by 1000`` or ``CANCELLED+``, and why it waits."""
    name = shown.partition(" ")[0].rstrip("+")
    state = next((state for state, names in _STATES.items() if name in names.split()), State.UNKNOWN)
    if state is State.PENDING and reason not in ("", "None", "(null)"):
        return QueuedJob(state, f"{name}: waits for {reason}")
    is_said = name == "SUSPENDED" or (state in (State.CANCELLED, State.FAILED) and name != "FAILED")
    return QueuedJob(state, f"Slurm reports {shown}" if is_said else "")
