# SPDX-License-Identifier: BSD-3-Clause
"""Run Slurm's commands on the job around this process."""

from __future__ import annotations

import contextlib
import os

_TIMEOUT = 60.0
"""Seconds that a command may take."""

RUNNING = "RUNNING"


def say(text: str) -> None:
    """Write a line to the job's log, which may be on a full disk: text that it cannot take is lost, and no error.

    ``print`` would keep that text, and end the process with code 120 for it.
    """
    with contextlib.suppress(OSError):
        os.write(1, f"{text}\n".encode(errors="backslashreplace"))


class JobCommands:
    """Slurm's commands for one job."""

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id

    def state(self) -> str:
        """Return Slurm's state of the job; empty if squeue fails."""
        return (_ask(self.job_id, "--format=%T") or [""])[0]

    def signal_tasks(self, component: int | None = None) -> None:
        """Request all tasks to stop (``task``), or those of one component of a heterogeneous job.

        Slurm signals all components for the first one's id (Slurm 22.05, also for ``ID+0``), but not for a step of it.
        """
        if component is None:
            _run("scancel", "--signal=URG", self.job_id)
            return
        job_id = os.environ[f"SLURM_JOB_ID_HET_GROUP_{component}"]
        if steps := [step for step in _ask(job_id, "--steps", "--format=%i") if step.rpartition(".")[2].isdigit()]:
            _run("scancel", "--signal=URG", *steps)

    def cancel(self) -> None:
        """Cancel the job; Slurm then ends this process."""
        _run("scancel", self.job_id)

    def requeue(self) -> bool:
        """Put the job back into the queue; Slurm then ends this process. Return whether Slurm accepts that."""
        return _run("scontrol", "requeue", self.job_id) is not None


def _ask(job_id: str, *options: str) -> list[str]:
    """Return the words that squeue prints of a job; none if it fails."""
    return (_run("squeue", "--noheader", f"--jobs={job_id}", *options) or "").split()


def _run(*words: str) -> str | None:
    """Run a command and return its stdout; log a message and return None if it fails."""
    import subprocess  # imported late: its import would delay the start of the steps

    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT, check=True)
    except subprocess.CalledProcessError as error:
        failure = error.stderr.strip()
    except (OSError, subprocess.SubprocessError) as error:
        failure = str(error)
    else:
        return done.stdout
    say(f"{' '.join(words)}: {failure}")
    return None
