# Copyright (c) the torchx-monarch authors.
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
from torchx_monarch.backends.slurm import array, states
from torchx_monarch.backends.slurm.folder import MARK
from torchx_monarch.model.env_names import JOB_VARIABLES

_TIMEOUT = 60.0
"""Seconds that a command may take: slurmctld answers late under load."""

_TOLD_WITHIN = 2.0
"""Seconds to wait for scancel to signal array tasks. While other tasks of the array wait, Slurm (22.05) delivers the
signal immediately but answers "try again later", and scancel then retries five times in half a minute."""

_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")

_NOT_INHERITED = frozenset({*JOB_VARIABLES, "SBATCH_ARRAY_INX"})
"""Variables that are not passed on. SBATCH_ARRAY_INX would make the submitted job an array."""

_ALL_INDICES = {"SLURM_BITSTR_LEN": "0"}
"""Makes commands print the whole list of waiting array tasks; by default they cut it at 64 characters."""


class SlurmError(BackendError):
    """A command of Slurm's failed or could not be run."""


class SlurmTimeoutError(SlurmError):
    """A command of Slurm's did not end in time."""


@dataclass(frozen=True)
class Job:
    """One record that Slurm reports: a job, a component of a job, or tasks of an array.

    Attributes:
        job_id: id of the component; equals the job's id for the first component.
        leader: id of the job or the array.
        name: the job's name.
        state: the state as Slurm prints it; may have several words, such as ``CANCELLED by 1000``.
        reason: Slurm's reason why the job waits or ended; empty if not reported.
        nodes: node list such as ``n[1-2]``; empty before nodes are assigned.
        restarts: how often Slurm has restarted the job; -1 if not reported.
        comment: the job's comment; empty if not reported.
        exit_code: exit code of the batch script; -N for signal N.
        tasks: indices of the array tasks in this record; several for waiting tasks, empty for a job that is no array.
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
    tasks: tuple[int, ...] = ()
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
        command: the program and its arguments.
        timeout: seconds that it may take.

    Raises:
        SlurmError: the program is missing or cannot be executed.
        SlurmTimeoutError: it does not end within ``timeout``.
    """
    try:
        return subprocess.run(
            command,
            env={**client_environment(os.environ), **(_ALL_INDICES if command[0] != "sbatch" else {})},
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
        raise SlurmTimeoutError(
            f"`{' '.join(command[:2])}` has not answered for {timeout:g} s: does slurmctld run?"
        ) from None


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
    try:
        printed = checked(command)
    except SlurmError as error:
        if "Invalid job array" not in str(error):
            raise
        found = re.search(r"MaxArraySize\s*=\s*(\d+)", run(["scontrol", "show", "config"]).stdout)
        limit = f": its MaxArraySize is {found[1]}, so indices are 0 to {int(found[1]) - 1}" if found else ""
        wanted = next((word for word in command if word.startswith("--array=")), "")
        raise SlurmError(f"{error} ({wanted} on this cluster{limit}; run option array)") from None
    # With several clusters, ``--parsable`` prints ID;CLUSTER.
    return printed.strip().splitlines()[-1].partition(";")[0]


def signal_batch_step(name: str) -> bool:
    """Send SIGUSR1, the request to cancel, to batch steps; return whether scancel accepted the signal.

    A plain scancel would send SIGTERM to all processes of the job and apply Slurm's own grace period.

    Args:
        name: a job, or tasks of an array, such as ``123``, ``123_7`` or ``123_[4,7]``.
    """
    command = ["scancel", "--batch", "--signal=USR1", name]
    if "_" not in name:
        return run(command).returncode == 0
    try:
        return run(command, _TOLD_WITHIN).returncode == 0
    except SlurmTimeoutError:
        return True


def live_job(app_id: str) -> list[Job]:
    """Return the components or array tasks of a job from slurmctld; empty if slurmctld has forgotten the job.

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
    """Parse ``scontrol show job -o``: one line per component or array task; waiting array tasks may share a line."""
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
                leader=found.get("HetJobId") or found.get("ArrayJobId", job_id),
                name=found.get("JobName", ""),
                state=found.get("JobState", ""),
                reason=found.get("Reason", ""),
                nodes="" if found.get("NodeList", "(null)") == "(null)" else found["NodeList"],
                restarts=int(found.get("Restarts", "-1")),
                comment=_comment(line),
                exit_code=_exit_code(found.get("ExitCode", "")),
                tasks=tuple(array.tasks(found.get("ArrayTaskId"))),
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
    """Return the records of jobs or arrays in the accounting database, by id; empty without accounting."""
    if not app_ids:
        return {}
    command = ["sacct", "--noheader", "--parsable2", "--allocations", f"--format={_SACCT_FIELDS}"]
    done = run([*command, f"--jobs={','.join(app_ids)}"])
    return {} if done.returncode else parse_sacct(done.stdout)


def recorded_job(app_id: str) -> list[Job]:
    """Return the records of one job or array in the accounting database; empty without accounting."""
    return recorded_jobs([app_id]).get(app_id, [])


_JOB_ID = re.compile(r"(\d+)(?:\+0*(\d+))?(?:_\[?([^\]]*)\]?)?")
"""The id that squeue and sacct print for a job (``17``), a component (``15+1``), an array task (``3_7``) or waiting
array tasks (``3_[4-9%2]``)."""


def _first_component(text: str) -> tuple[str, tuple[int, ...]] | None:
    """Parse an id of squeue or sacct: the job's id and the array tasks; None for components beyond the first."""
    match = _JOB_ID.fullmatch(text)
    if match is None or int(match[2] or 0):
        return None
    return match[1], tuple(array.tasks(match[3]))


def parse_sacct(text: str) -> dict[str, list[Job]]:
    """Parse ``sacct --parsable2`` by job id. Components beyond the first, which runs the script, are left out."""
    jobs: dict[str, list[Job]] = {}
    for line in text.splitlines():
        fields = line.split("|", 4)
        found = _first_component(fields[0]) if len(fields) == 5 else None
        if found is None:
            continue
        job_id, indices = found
        nodes = "" if fields[3] == "None assigned" else fields[3]
        code = _exit_code(fields[2])
        job = Job(job_id, job_id, fields[4], fields[1], nodes=nodes, exit_code=code, tasks=indices, is_accounted=True)
        jobs.setdefault(job_id, []).append(job)
    return jobs


_SQUEUE_FORMAT = "%A|%i|%T|%r|%j|%k"


def listed_jobs() -> list[Job]:
    """Return the jobs of this user from slurmctld: one per job; for an array one per begun task, and one for the rest.

    Raises:
        SlurmError: squeue fails or cannot be run.
    """
    user = str(os.getuid())
    command = ["squeue", "--noheader", "--all", f"--user={user}", "--states=all", f"--format={_SQUEUE_FORMAT}"]
    return parse_squeue(checked(command))


def parse_squeue(text: str) -> list[Job]:
    """Parse squeue's output in ``_SQUEUE_FORMAT``; components beyond the first are left out."""
    jobs = []
    for line in text.splitlines():
        fields = line.split("|", 5)
        found = _first_component(fields[1]) if len(fields) == 6 else None
        if found is None:
            continue
        leader, indices = found
        job = Job(fields[0], leader, fields[4], fields[2], fields[3], comment=fields[5].strip(), tasks=indices)
        jobs.append(job)
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
