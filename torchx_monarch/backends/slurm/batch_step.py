# SPDX-License-Identifier: BSD-3-Clause
"""The request of a job, and what runs on its first node: ``entrypoint.py slurm.batch_step FOLDER``.

Standard library only. The batch step starts a step (srun) for each role, whose tasks run the replicas (``batch.task``),
and owns the app: when ``core.state`` has decided how it ends, the batch step asks the tasks that are left to stop. It
records the result, and puts the job back into the queue where that is asked for. SIGTERM comes from Slurm: a time
limit, a preemption, scancel.

Only the owner can read request.json, and it holds the commands and environments. On a command line or in the batch
script they would be visible to all users of the node or of the accounting database.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torchx_monarch.backends import entrypoint
from torchx_monarch.backends.batch.folder import BatchRequest, JobFolder
from torchx_monarch.backends.batch.snapshot import QueuedJob, read_app, read_replica
from torchx_monarch.backends.batch.task import APP_ID, read_request_or_exit
from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.snapshot import AppSnapshot, Outcome
from torchx_monarch.backends.core.state import HOST_EXTRA, SETTLE, pending_stop, reduce
from torchx_monarch.backends.local.supervision import RoleRequest, SupervisorRecord, run_on_end
from torchx_monarch.insight import events
from torchx_monarch.model.env_names import replica0_variable
from torchx_monarch.model.host_result import HostResult
from torchx_monarch.model.job_result import shell_code
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.model.state import State
from torchx_monarch.system import processes, safe_files

_STARTER = (sys.executable, "-I", "-S", entrypoint.__file__)
"""The command that starts what runs in the job, without its arguments: the batch step has the submitter's Python."""

_STOP_EXTRA = HOST_EXTRA + 10.0
"""Seconds beyond the grace period after which steps that have not stopped are killed."""

_REQUEUE_TIMEOUT = 120.0
"""Seconds in which Slurm ends this process after scancel or a requeue."""

_TOLD_BY_SLURM = Outcome(State.PENDING, "told to stop by Slurm")

_COMPONENTS_OWN = ("SLURM_CPUS_PER_TASK", "SLURM_GPUS", "SLURM_MEM_PER_", "SLURM_TRES_PER_TASK")
"""Beginnings of variables with the first component's resources, which srun would apply to steps of the others, too."""

_READ = 16 * 1024
"""Bytes of the job's log that are searched for an error."""

_ERROR = re.compile(r"(?:\d+: |(?=srun: |slurmstepd))(?:(?:srun|slurmstepd[\w.-]*): error: )?(.*\S)")
"""A line of a task, which its number precedes, or an error of srun or slurmstepd."""

_AFTERWARDS = re.compile(
    r"Exited with exit code|^(task \d+|spank)[:_ ]|to unblock task|STEP \d|JOB \d|Terminating|_try_parse|plugin stack"
)
"""Errors of srun and slurmstepd that follow from another one."""


@dataclass
class SlurmRole(RoleRequest):
    """One role: a step of the job, with one task on each of its nodes.

    Attributes:
        sbatch: sbatch options of its component, by name without dashes; None for an option without a value.
        srun: srun options of its step; with ``container-image`` it runs in containers of pyxis.
    """

    sbatch: dict[str, str | None] = field(default_factory=dict)
    srun: dict[str, str | None] = field(default_factory=dict)

    @property
    def image_name(self) -> str:
        """The image of its containers; empty if it runs on the nodes themselves."""
        return self.srun.get("container-image") or ""


@dataclass
class SlurmRequest(BatchRequest):
    """One job.

    Attributes:
        requeue: whether Slurm may restart the job after a lost node or a preemption.
    """

    roles: list[SlurmRole]  # type: ignore[assignment]
    requeue: bool = False

    @property
    def script(self) -> str:
        return f"#!/bin/sh\nexec {shlex.join([*_STARTER, 'slurm.batch_step', self.folder])}\n"

    def step(self, index: int) -> list[str]:
        """Return the command that starts the step of the role of this index.

        setsid keeps signals to the batch step's session away from srun, which would end the tasks.
        """
        role = self.roles[index]
        is_component = len(self.roles) > 1 and "relative" not in role.srun  # else the roles share an allocation
        group = [f"--het-group={index}"] if is_component else []
        # An image has its own Python, whatever path the submitter's has.
        starter = ("python", "-I", "-m", entrypoint.__name__) if role.image_name else _STARTER
        words = ["setsid", "srun", *group, *option_words(role.srun), "--input=none", "--label"]
        return [*words, *starter, "batch.task", self.folder, str(index), "SLURM_PROCID-0"]


def option_words(options: Mapping[str, str | None]) -> list[str]:
    """Return ``{"nodes": "2", "exclusive": None}`` as the arguments ``--nodes=2 --exclusive``."""
    return [f"--{name}" if value is None else f"--{name}={value}" for name, value in options.items()]


class BatchStep:
    def __init__(self, folder: JobFolder, request: SlurmRequest) -> None:
        self._folder = folder
        self._request = request
        before, now = folder.load_record(), time.time()
        self._record = SupervisorRecord(os.environ["SLURM_JOB_ID"], request.name, now, State.RUNNING, started=now)
        self._is_queued_again = before is not None
        if before is not None:
            self._record.started = before.started
        self._steps: dict[int, int] = {}
        """The index of each role whose step runs, by the process of its srun."""
        self._is_stopping = False
        """Whether Slurm has told the job to stop."""
        self._decided = float("inf")
        """When the app was decided while tasks are left (``time.monotonic``)."""
        self._kill_at = float("inf")

    def run(self) -> int:
        wake = processes.watch_signals((signal.SIGTERM, signal.SIGCHLD))
        with contextlib.suppress(OSError):  # a full disk
            safe_files.make_reserve(self._folder.reserve, self._record.reserve_bytes)
        self._write()
        if (stop := self._folder.load_stop()) is not None and stop.state is State.CANCELLED:
            return self._conclude()  # the job was cancelled while Slurm requeued it
        if self._is_queued_again:  # the folder of a new job is clear, and may have a request to stop by now
            with contextlib.suppress(OSError):  # a full disk
                self._clear()
        self._start()
        while self._steps:
            select.select([wake], [], [], 1.0)  # then it looks at the records of the tasks
            with contextlib.suppress(BlockingIOError):
                if signal.SIGTERM in os.read(wake, 4096) and not self._is_stopping:
                    self._stop(_TOLD_BY_SLURM)
            self._reap()
            self._end_rest()
            if time.monotonic() > self._kill_at:
                _say("steps did not stop in time: killing them")
                for pid in self._steps:  # srun kills its tasks then
                    os.kill(pid, signal.SIGTERM)
                self._kill_at = time.monotonic() + _STOP_EXTRA
        return self._conclude()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        """Remove what the tasks of an earlier run have recorded, and its request to stop."""
        self._folder.clear(self._request.roles)
        for role in self._request.roles:
            for k in range(1, role.spec.replicas):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._folder.replica(role.spec.name, k).status)

    def _start(self) -> None:
        unwanted = _COMPONENTS_OWN if len(self._request.roles) > 1 else ()
        environ = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
        environ[APP_ID] = self._record.app_id
        environ["MONARCH_RESTART"] = os.environ.get("SLURM_RESTART_COUNT", "0")
        # This is the first node. Where other roles begin, their tasks record.
        environ[replica0_variable(0)] = os.environ["SLURMD_NODENAME"]
        for index in range(len(self._request.roles)):
            words = self._request.step(index)
            # CPython ignores these two signals at start-up, and children inherit that.
            defaults = (signal.SIGPIPE, signal.SIGXFSZ)
            self._steps[os.posix_spawnp(words[0], words, environ, setsigdef=defaults)] = index

    def _reap(self) -> None:
        for pid, index in list(self._steps.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._steps[pid]
                spec, code = self._request.roles[index].spec, os.waitstatus_to_exitcode(status)
                self._event("role_ended", f"role {spec.name} ended with code {code}", role=spec.name, exit_code=code)
                if spec.min_groups or spec.is_elastic:
                    self._record_losses(spec)

    def _record_losses(self, spec: RoleSpec) -> None:
        """Record the end of those replicas of a role whose node was lost: for readers, the job itself may go on."""
        for k in range(spec.replicas):
            paths = self._folder.replica(spec.name, k)
            record = paths.load_record()
            if record is not None and not record.terminal:
                lost = read_replica(spec, k, record, QueuedJob(State.FAILED), None)
                record.state, record.msg, record.ended = State.FAILED, lost.failure, time.time()
                with contextlib.suppress(OSError):  # a full disk
                    state_files.write_json(paths.status, asdict(record))

    # -- decisions -----------------------------------------------------------------------------------------------------

    def _snapshot(self) -> AppSnapshot:
        roles, jobs = self._request.roles, []
        for index, role in enumerate(roles):
            runs = index in self._steps.values()
            jobs.append([QueuedJob(State.RUNNING if runs else State.FAILED, self._failure(index))] * role.spec.replicas)
        specs, ending = [role.spec for role in roles], self._folder.load_ending()
        return read_app(self._record.app_id, self._request.name, self._folder, specs, jobs, ending)

    def _failure(self, index: int) -> str:
        """Return why no task of a role has started; empty if one has, or its step runs."""
        role = self._request.roles[index]
        if index in self._steps.values() or any(self._folder.records(role.spec)):
            return ""
        what = f"container of {role.image_name}" if role.image_name else "task"
        return f"no {what} has started: {last_error(self._folder.job_log)}".rstrip(": ")

    def _end_rest(self) -> None:
        """Ask the tasks that are left to stop, some seconds after the app is decided."""
        if self._is_stopping:
            return
        if (stop := self._folder.load_stop()) is not None:
            grace = self._request.grace if stop.grace is None else stop.grace
            self._kill_at = min(self._kill_at, time.monotonic() + grace + _STOP_EXTRA)
            return
        snapshot = self._snapshot()
        if (cause := reduce(snapshot).cause) and cause.was_stopped:
            self._stop(_TOLD_BY_SLURM)  # in the GraceTime of a preemption, Slurm signals the tasks alone
            return
        outcome = pending_stop(snapshot)
        if outcome is None:
            self._decided = float("inf")
            return
        self._decided = min(self._decided, time.monotonic())
        if outcome.state is State.SUCCEEDED or time.monotonic() > self._decided + SETTLE:
            self._stop(outcome)

    def _stop(self, outcome: Outcome) -> None:
        self._is_stopping = outcome is _TOLD_BY_SLURM
        message = outcome.message or str(outcome.state)
        self._event("stop", f"{message}; what still runs has {self._request.grace:g} s to end")
        with contextlib.suppress(OSError):
            self._folder.write_stop(outcome, None)
        self._kill_at = time.monotonic() + self._request.grace + _STOP_EXTRA

    def _conclude(self) -> int:
        """Record how the job has ended, or queue it again; return its exit code."""
        status, stop = reduce(self._snapshot()), self._folder.load_stop()
        if status.outcome is not None and status.outcome.state is State.SUCCEEDED:
            return self._finish(State.SUCCEEDED, "", 0)
        if stop is not None and stop.state is State.CANCELLED:
            code = self._finish(State.CANCELLED, stop.message or "cancelled", 128 + signal.SIGTERM)
            # Only scancel gives the job the state CANCELLED in Slurm.
            _run("scancel", self._record.app_id)
            time.sleep(_REQUEUE_TIMEOUT)
            return code
        state = (_run("squeue", "-h", "-o", "%T", "-j", self._record.app_id) or "").split()[:1]
        if self._is_stopping:
            if self._request.requeue and state == ["RUNNING"]:  # else Slurm itself may be about to queue it again
                self._event("requeue", f"{self._how_stopped()}; the job goes back into the queue")
                if _run("scontrol", "requeue", self._record.app_id) is not None:
                    time.sleep(_REQUEUE_TIMEOUT)
                reason = f"the job could not be queued again (see {self._folder.job_log})"
                return self._finish(State.FAILED, f"{self._how_stopped()}; {reason}", 1)
            self._record.outside = True
            return self._finish(State.FAILED, self._how_stopped(), 128 + signal.SIGTERM)
        # When a node is lost, Slurm queues the job again and ends its steps, perhaps before SIGTERM comes here.
        self._record.outside = state not in ([], ["RUNNING"], ["SIGNALING"], ["RESIZING"])
        code = shell_code(status.cause.exit_code or 1) if status.cause else 1
        return self._finish(State.FAILED, status.message, code)

    def _how_stopped(self) -> str:
        """Return that Slurm has stopped the job, and how the ranks of the first role have ended."""
        record = self._folder.replica(self._request.roles[0].spec.name, 0).load_record()
        said = HostResult.from_text(record.roles[0].replicas[0].error).reason if record is not None else ""
        return f"told to stop by Slurm: {said}" if said else "told to stop by Slurm"

    # -- the record ----------------------------------------------------------------------------------------------------

    def _finish(self, state: State, message: str, code: int) -> int:
        self._record.state, self._record.msg, self._record.ended = state, message, time.time()
        is_outside = self._record.outside and not self._is_stopping
        if is_outside:  # Slurm queues the job again, or says how it has ended
            self._event("stop", f"Slurm ends the steps: {message}")
        else:
            self._event("ended", f"{state}: {message}" if message else str(state))
        self._write(is_last=True)
        command = self._request.roles[0].spec.on_end
        if command and not is_outside:
            happened = events.read(self._folder.events, below=self._folder.trusted)[0]
            outcome, started = Outcome(state, message, time=self._record.ended), self._record.started or 0.0
            app = replace(self._snapshot(), events=happened, started=started, native=outcome)
            run_on_end(command, app, code, self._record, self._folder)
        return code

    def _write(self, *, is_last: bool = False) -> None:
        """Write the record, the last one on a full disk, too. A loss is no reason to end the job: it is logged."""
        try:
            if is_last:
                self._record.save_last(self._folder)
            else:
                state_files.write_json(self._folder.status, asdict(self._record))
        except OSError as error:
            _say(f"the record {self._record} could not be written: {error}")

    def _event(self, kind: str, message: str, **fields: Any) -> None:
        _say(message)
        events.append(self._folder.events, kind, message, **fields)


def last_error(job_log: str) -> str:
    """Return the last error that srun, slurmstepd or pyxis has written to the job's log; empty if none is found."""
    with contextlib.suppress(OSError), open(safe_files.open_file(job_log), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _READ))
        for line in reversed(file.read().decode(errors="replace").splitlines()):
            found = _ERROR.match(line)
            if found and not _AFTERWARDS.search(found[1]):
                return found[1][:500]
    return ""


def _say(text: str) -> None:
    """Write a line to the job's log, which may be on a full disk: text that it cannot take is lost, and no error.

    ``print`` would keep that text, and end the process with code 120 for it.
    """
    with contextlib.suppress(OSError):
        os.write(1, f"{text}\n".encode(errors="backslashreplace"))


def _run(*words: str) -> str | None:
    """Run one of Slurm's commands and return its stdout; log a message and return None if it fails."""
    import subprocess  # imported late: its import would delay the start of the steps

    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60.0, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        _say(f"{' '.join(words)}: {getattr(error, 'stderr', '') or error}")
        return None
    return done.stdout.strip()


def main(path: str) -> int:
    """Run the job whose folder this is, and return its exit code."""
    folder = JobFolder(path)
    return BatchStep(folder, read_request_or_exit(SlurmRequest, folder)).run()
