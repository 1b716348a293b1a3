# SPDX-License-Identifier: BSD-3-Clause
"""Run Slurm's commands and parse their output.

The commands are asked for named fields, which are the same in all versions of Slurm; ``--json`` output differs.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchx_monarch.backends.core.errors import BackendError
from torchx_monarch.backends.slurm import states
from torchx_monarch.backends.slurm.folder import MARK
from torchx_monarch.model.env_names import JOB_VARIABLES

_TIMEOUT = 60.0
"""Seconds that a command may take: slurmctld answers late under load."""

_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")

_NOT_INHERITED = frozenset({*JOB_VARIABLES, "SBATCH_ARRAY_INX"})
"""Variables that are not passed on. SBATCH_ARRAY_INX would make the submitted job an array."""


class SlurmError(BackendError):
    """A command of Slurm's failed or could not be run."""


@dataclass(frozen=True)
class Job:
    """One record that Slurm reports: a job, or a component of a job.

    Attributes:
        job_id: id of the component; equals the job's id for the first component.
        leader: id of the job.
        name: the job's name.
        state: the state as Slurm prints it; may have several words, such as ``CANCELLED by 1000``.
        reason: Slurm's reason why the job waits or ended; empty if not reported.
        nodes: node list such as ``n[1-2]``; empty before nodes are assigned.
        restarts: how often Slurm has restarted the job; -1 if not reported.
        comment: the job's comment; empty if not reported.
        exit_code: exit code of the batch script; -N for signal N.
        other_user: name of the job's owner if that is another user; empty if it is this user, or not asked for.
        is_accounted: whether the accounting database reports it, which may lag behind.
    """

    job_id: str
    leader: str
    name: str
    state: str
    reason: str = ""
    nodes: str = ""
    restarts: int = -1
    comment: str = ""
    exit_code: int = 0
    other_user: str = ""
    is_accounted: bool = False

    @property
    def is_live(self) -> bool:
        """Whether it waits or runs. While Slurm cleans up the nodes (COMPLETING), it has ended."""
        return not states.to_state(self.state).is_terminal and states.word(self.state) != "COMPLETING"


def client_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for Slurm's commands.

    Within a job, SLURM_* variables are left out: they describe that job, and sbatch would read them as options.
    """
    inside = "SLURM_JOB_ID" in environ
    return {
        name: value
        for name, value in environ.items()
        if name not in _NOT_INHERITED and (not inside or not name.startswith(("SLURM_", "SLURMD_")) or name in _KEPT)
    }


def run(command: Sequence[str], timeout: float = _TIMEOUT) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands.

    Args:
        timeout: seconds that it may take.

    Raises:
        SlurmError: the program is missing, cannot be executed, or does not end within ``timeout``.
    """
    try:
        return subprocess.run(
            command,
            env=client_environment(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
            start_new_session=True,  # Ctrl-C is for this process, which may need the answer (``SlurmBackend.submit``)
        )
    except FileNotFoundError:
        raise SlurmError(
            f"{command[0]!r} is not on the PATH: monarch_slurm needs Slurm's commands, as the login nodes of a cluster "
            "have them (Debian: slurm-client, Red Hat: slurm)."
        ) from None
    except OSError as error:
        raise SlurmError(f"{command[0]!r} cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"`{' '.join(command[:2])}` has not answered for {timeout:g} s: does slurmctld run?") from None


def checked(command: Sequence[str]) -> str:
    """Run one of Slurm's commands and return its stdout.

    Raises:
        SlurmError: it exits with a non-zero code or cannot be run; the message holds its stderr.
    """
    done = run(command)
    if done.returncode:
        answer = done.stderr.strip() or f"exit code {done.returncode}"
        raise SlurmError(f"{command[0]} refuses: {answer}")
    return done.stdout


def submit(command: Sequence[str]) -> str:
    """Run sbatch and return the job's id.

    Raises:
        SlurmError: sbatch refuses the job or cannot be run.
    """
    # With several clusters, ``--parsable`` prints ID;CLUSTER.
    return checked(command).strip().splitlines()[-1].partition(";")[0]


def signal_batch_step(app_id: str) -> bool:
    """Send SIGUSR1, the request to cancel, to a job's batch step; return whether scancel accepted the signal.

    A plain scancel would send SIGTERM to all processes of the job and apply Slurm's own grace period.
    """
    return run(["scancel", "--batch", "--signal=USR1", app_id]).returncode == 0


def live_job(app_id: str) -> list[Job]:
    """Return the components of a job from slurmctld; empty if slurmctld has forgotten the job.

    Raises:
        SlurmError: scontrol fails or cannot be run.
    """
    done = run(["scontrol", "show", "job", "-o", app_id])
    if done.returncode:
        if "Invalid job id" in done.stderr + done.stdout:
            return []
        raise SlurmError(f"scontrol refuses: {done.stderr.strip() or done.stdout.strip()}")
    return parse_scontrol(done.stdout)


def parse_scontrol(text: str) -> list[Job]:
    """Parse ``scontrol show job -o``: one line per component."""
    jobs, other = [], _other_user(text)
    for line in text.splitlines():
        if not line.startswith("JobId="):
            continue
        # The first value of each name counts: text from users, such as the comment, comes late in the line.
        found: dict[str, str] = {}
        for match in re.finditer(r"(?:^|(?<=\s))([A-Za-z][\w:/]*)=(.*?)(?=\s[A-Za-z][\w:/]*=|\s*$)", line):
            found.setdefault(match[1], match[2])
        job_id = found["JobId"]
        jobs.append(
            Job(
                job_id=job_id,
                leader=found.get("HetJobId", job_id),
                name=found.get("JobName", ""),
                state=found.get("JobState", ""),
                reason=found.get("Reason", ""),
                nodes="" if found.get("NodeList", "(null)") == "(null)" else found["NodeList"],
                restarts=int(found.get("Restarts", "-1")),
                comment=_comment(line),
                exit_code=_exit_code(found.get("ExitCode", "")),
                other_user=other,
            )
        )
    return jobs


def _exit_code(text: str) -> int:
    """Parse ``CODE:SIGNAL``; -N for signal N."""
    code, _, number = text.partition(":")
    return -int(number) if number not in ("", "0") else int(code or 0)


def _other_user(text: str) -> str:
    """Return the owner's name from the output of ``scontrol show job``; empty if it is this user.

    A job's name precedes its owner in that output, and its comment follows it, so either may hold another ``UserId=``.
    The real one names this user for certain only if all of them do.
    """
    owners = {int(uid) for uid in re.findall(r"UserId=.*?\((\d+)\)", text)}
    if owners == {os.getuid()}:
        return ""
    uid = next((uid for uid in owners if uid != os.getuid()), None)
    with contextlib.suppress(KeyError, OverflowError):
        return "unknown" if uid is None else pwd.getpwuid(uid).pw_name
    return str(uid)


def _comment(line: str) -> str:
    """Return the comment: up to the next ``Name=`` after MARK, since the user's text before it may hold ``Name=``."""
    found = re.search(rf" Comment=((?:.* {MARK}|.*?)[^ ].*?)\s*(?= [A-Z][A-Za-z]*=|$)", line)
    return found[1] if found else ""


_SACCT_FIELDS = "JobID,State,ExitCode,NodeList,JobName"


def recorded_jobs(app_ids: Sequence[str]) -> dict[str, list[Job]]:
    """Return the records of jobs in the accounting database, by id; empty without accounting."""
    if not app_ids:
        return {}
    command = ["sacct", "--noheader", "--parsable2", "--allocations", f"--format={_SACCT_FIELDS}"]
    done = run([*command, f"--jobs={','.join(app_ids)}"])
    return {} if done.returncode else parse_sacct(done.stdout)


_JOB_ID = re.compile(r"(\d+)(?:\+0+)?")
"""The id that squeue and sacct print for a job (``17``) or its first component (``15+0``), which runs the script; not
that of another component (``15+1``), nor that of tasks of an array (``3_7``), which is no job of ours."""


def parse_sacct(text: str) -> dict[str, list[Job]]:
    """Parse ``sacct --parsable2`` by job id. Components beyond the first and arrays are left out."""
    jobs: dict[str, list[Job]] = {}
    for line in text.splitlines():
        fields = line.split("|", 4)
        found = _JOB_ID.fullmatch(fields[0]) if len(fields) == 5 else None
        if found is None:
            continue
        job_id = found[1]
        nodes = "" if fields[3] == "None assigned" else fields[3]
        code = _exit_code(fields[2])
        job = Job(job_id, job_id, fields[4], fields[1], nodes=nodes, exit_code=code, is_accounted=True)
        jobs.setdefault(job_id, []).append(job)
    return jobs


_SQUEUE_FORMAT = "%A|%i|%T|%r|%j|%k"


def listed_jobs() -> list[Job]:
    """Return the jobs of this user from slurmctld, without arrays.

    Raises:
        SlurmError: squeue fails or cannot be run.
    """
    user = str(os.getuid())
    command = ["squeue", "--noheader", "--all", f"--user={user}", "--states=all", f"--format={_SQUEUE_FORMAT}"]
    return parse_squeue(checked(command))


def parse_squeue(text: str) -> list[Job]:
    """Parse squeue's output in ``_SQUEUE_FORMAT``; components beyond the first and arrays are left out."""
    jobs = []
    for line in text.splitlines():
        fields = line.split("|", 5)
        found = _JOB_ID.fullmatch(fields[1]) if len(fields) == 6 else None
        if found is not None:
            jobs.append(Job(fields[0], found[1], fields[4], fields[2], fields[3], comment=fields[5].strip()))
    return jobs


_NODE_LIST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,\[\]-]*")


def hostnames(nodes: str) -> list[str]:
    """Expand a node list such as ``n[1-2]``, in order; empty if it is malformed or scontrol fails."""
    if not _NODE_LIST.fullmatch(nodes):
        return []
    if "[" not in nodes:
        return nodes.split(",")
    try:
        done = run(["scontrol", "show", "hostnames", nodes])
    except SlurmError:
        return []
    return done.stdout.split() if done.returncode == 0 else []


def partition_memory(partition: str | None) -> int | None:
    """Return the memory of a partition's nodes in MB; None if sinfo does not report it.

    Args:
        partition: the partition; None for the default one.
    """
    try:
        done = run(["sinfo", "--noheader", "--format=%P|%m", "--noconvert"])
    except SlurmError:
        return None  # a dry run needs no cluster
    for line in done.stdout.splitlines():
        name, _, memory = line.partition("|")
        if (name.rstrip("*") == partition) if partition else name.endswith("*"):
            digits = re.match(r"\d+", memory)
            return int(digits[0]) if digits else None
    return None
