# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Slurm's commands, and what they say.

Formats that are asked for by name are the same in all versions; ``--json`` differs from each to the next.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchx.specs.finder import ComponentValidationException

from torchx_monarch.backends.slurm import array
from torchx_monarch.backends.slurm.folder import MARK
from torchx_monarch.model.env_names import OF_A_JOB

_TIMEOUT = 60.0
"""Seconds that a command may take: a controller under load answers late."""

_TOLD_WITHIN = 2.0
"""Seconds for a signal to array tasks. While others of the array wait, Slurm (22.05) passes it on at once and answers
that one may try again later, as scancel then does for half a minute, five times."""

_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")

_LEFT_OUT = frozenset({*OF_A_JOB, "SBATCH_ARRAY_INX"})
"""The last would make an array of a job that knows of none."""

_ALL_INDICES = {"SLURM_BITSTR_LEN": "0"}
"""Else commands say no more than the first 64 characters of the list of array tasks that wait."""


class SlurmError(ComponentValidationException, RuntimeError):  # type: ignore[misc]
    """Slurm could not be asked, or refused. The torchx command shows the message without a traceback."""


class SlurmSilentError(SlurmError):
    """A command of Slurm's has not ended in time."""


@dataclass(frozen=True)
class Job:
    """What Slurm says of a job, of one component of it, or of tasks of an array.

    Attributes:
        job_id: of the component; the job's own for the first.
        leader: id of the job, or of the array.
        name: the app's.
        state: Slurm's word, or several.
        reason: why it waits or ended.
        nodes: node list such as ``n[1-2]``; empty while it has none.
        restarts: how often Slurm has started it again; -1 where that is not said.
        comment: the job's.
        exit_code: of the batch script; -N for signal N.
        tasks: the indices of the array tasks that this is, several for those that wait; empty where there is no array.
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


def client_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment to submit with. Within a job, what describes that job would become options of the new one."""
    inside = "SLURM_JOB_ID" in environ
    return {
        name: value
        for name, value in environ.items()
        if name not in _LEFT_OUT and (not inside or not name.startswith(("SLURM_", "SLURMD_")) or name in _KEPT)
    }


def run(command: Sequence[str], timeout: float = _TIMEOUT) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands.

    Args:
        command: its words.
        timeout: seconds that it may take.

    Raises:
        SlurmError: it is not there.
        SlurmSilentError: it does not answer.
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
        )
    except FileNotFoundError:
        raise SlurmError(
            f"{command[0]!r} is not on the PATH: monarch_slurm needs Slurm's commands, as the login nodes of a cluster "
            "have them (Debian: slurm-client, Red Hat: slurm)."
        ) from None
    except OSError as error:
        raise SlurmError(f"{command[0]!r} cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise SlurmSilentError(
            f"`{' '.join(command[:2])}` has not answered for {timeout:g} s: does slurmctld run?"
        ) from None


def checked(command: Sequence[str]) -> str:
    """Its output.

    Raises:
        SlurmError: it failed; the message is what it said.
    """
    done = run(command)
    if done.returncode:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise SlurmError(f"{command[0]} refuses: {said}")
    return done.stdout


def submit(command: Sequence[str]) -> str:
    """Run sbatch; the job's id.

    Raises:
        SlurmError: it was refused.
    """
    try:
        said = checked(command)
    except SlurmError as error:
        if "Invalid job array" not in str(error):
            raise
        found = re.search(r"MaxArraySize\s*=\s*(\d+)", run(["scontrol", "show", "config"]).stdout)
        limit = f": its MaxArraySize is {found[1]}, so indices are 0 to {int(found[1]) - 1}" if found else ""
        wanted = next((word for word in command if word.startswith("--array=")), "")
        raise SlurmError(f"{error} ({wanted} on this cluster{limit}; run option array)") from None
    # With several clusters, ``--parsable`` prints ID;CLUSTER.
    return said.strip().splitlines()[-1].partition(";")[0]


def tell_batch(name: str) -> bool:
    """Signal a batch step that its end is asked for (SIGUSR1); whether it could be.

    To it alone: Slurm's own SIGTERM would reach all processes, with a grace of its own.

    Args:
        name: a job, or tasks of an array.
    """
    command = ["scancel", "--batch", "--signal=USR1", name]
    if "_" not in name:
        return run(command).returncode == 0
    try:
        return run(command, _TOLD_WITHIN).returncode == 0
    except SlurmSilentError:
        return True


def live_job(app_id: str) -> list[Job]:
    """The components or array tasks of a job that the controller remembers; none when it has forgotten it.

    Raises:
        SlurmError: the controller cannot be asked.
    """
    done = run(["scontrol", "show", "job", "-o", app_id])
    if done.returncode:
        if "Invalid job id" in done.stderr + done.stdout:
            return []
        raise SlurmError(f"scontrol refuses: {done.stderr.strip() or done.stdout.strip()}")
    return parse_scontrol(done.stdout)


def parse_scontrol(text: str) -> list[Job]:
    """Read ``scontrol show job -o``: a line for each component, and for array tasks; those that wait may have one."""
    jobs = []
    for line in text.splitlines():
        if not line.startswith("JobId="):
            continue
        # The first of each name counts: texts of users' own come late in the line.
        found: dict[str, str] = {}
        for match in re.finditer(r"(?:^|(?<=\s))([A-Za-z][\w:/]*)=(.*?)(?=\s[A-Za-z][\w:/]*=|\s*$)", line):
            found.setdefault(match[1], match[2])
        code, _, number = found.get("ExitCode", "0:0").partition(":")
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
                exit_code=-int(number) if number not in ("", "0") else int(code),
                tasks=tuple(array.tasks(found.get("ArrayTaskId"))),
            )
        )
    return jobs


def _comment(line: str) -> str:
    """Up to the next name; what a user's text has before our note may look like one."""
    found = re.search(rf" Comment=((?:.* {MARK}|.*?)[^ ].*?)\s*(?= [A-Z][A-Za-z]*=|$)", line)
    return found[1] if found else ""


_SACCT_FIELDS = "JobID,State,ExitCode,NodeList,JobName"


def recorded_jobs(app_ids: Sequence[str]) -> dict[str, list[Job]]:
    """What the accounting database knows of jobs or arrays, by id; empty where there is no accounting."""
    if not app_ids:
        return {}
    command = ["sacct", "--noheader", "--parsable2", "--allocations", f"--format={_SACCT_FIELDS}"]
    done = run([*command, f"--jobs={','.join(app_ids)}"])
    return {} if done.returncode else parse_sacct(done.stdout)


def accounts_of(app_id: str) -> list[Job]:
    """The same of one job or array."""
    return recorded_jobs([app_id]).get(app_id, [])


_JOB_ID = re.compile(r"(\d+)(?:\+0*(\d+))?(?:_\[?([^\]]*)\]?)?")
"""What squeue and sacct call a job (``17``), a component (``15+1``), an array task (``3_7``), or those that wait
(``3_[4-9%2]``)."""


def parse_sacct(text: str) -> dict[str, list[Job]]:
    """Read ``sacct --parsable2 --format=...``; of a job of several components the first, which ran the script."""
    jobs: dict[str, list[Job]] = {}
    for line in text.splitlines():
        fields = line.split("|", 4)
        if len(fields) < 5:
            continue
        match = _JOB_ID.fullmatch(fields[0])
        if match is None or (match[2] or "0") != "0":
            continue
        job_id, indices = match[1], tuple(array.tasks(match[3]))
        code, _, number = fields[2].partition(":")
        exit_code = -int(number) if number not in ("", "0") else int(code or 0)
        nodes = "" if fields[3] == "None assigned" else fields[3]
        job = Job(job_id, job_id, fields[4], fields[1], nodes=nodes, exit_code=exit_code, tasks=indices)
        jobs.setdefault(job_id, []).append(job)
    return jobs


_SQUEUE_FORMAT = "%A|%i|%T|%r|%j|%k"


def listed_jobs() -> list[Job]:
    """The jobs of this user that the controller remembers, one for each; of an array one for each task that has begun,
    and one for those that wait.

    Raises:
        SlurmError: the controller cannot be asked.
    """
    user = str(os.getuid())
    command = ["squeue", "--noheader", "--all", f"--user={user}", "--states=all", f"--format={_SQUEUE_FORMAT}"]
    return parse_squeue(checked(command))


def parse_squeue(text: str) -> list[Job]:
    """Read ``squeue --format=...`` as above; components beyond the first are left out."""
    jobs = []
    for line in text.splitlines():
        fields = line.split("|", 5)
        match = _JOB_ID.fullmatch(fields[1]) if len(fields) == 6 else None
        if match is None or (match[2] or "0") != "0":
            continue
        indices = tuple(array.tasks(match[3]))
        job = Job(fields[0], match[1], fields[4], fields[2], fields[3], comment=fields[5].strip(), tasks=indices)
        jobs.append(job)
    return jobs


_NODE_LIST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,\[\]-]*")


def hostnames(nodes: str) -> list[str]:
    """The nodes of a node list, in order; empty where Slurm cannot say, or where it is none."""
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
    """Megabytes of the nodes of a partition, or of the default one; None where Slurm cannot say."""
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
