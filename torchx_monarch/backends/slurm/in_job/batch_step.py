# SPDX-License-Identifier: BSD-3-Clause
"""The batch step: run a step for each role, retry failures, stop steps, record the job's result.

It runs as ``entrypoint.py job FOLDER [PID ...]`` on the first node of the job. The PIDs are the roles' steps, if the
batch script has started them.

``core.state`` decides how the app ends, ``core.retries`` whether a role or the app is restarted.

SIGUSR1 requests cancellation; SIGTERM comes from Slurm. On either, the batch step signals all tasks to stop (see
``task``) and gives them the grace period. If Slurm itself restarts the job, as after a lost node, it ends this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NoReturn

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.snapshot import AppSnapshot, ReplicaSnapshot, RoleSnapshot
from torchx_monarch.backends.core.state import HOST_EXTRA, RetryBudget, reduce
from torchx_monarch.backends.slurm import macros, records
from torchx_monarch.backends.slurm.container import last_error
from torchx_monarch.backends.slurm.folder import JobFolder, read_request
from torchx_monarch.backends.slurm.in_job.commands import RUNNING, JobCommands, say
from torchx_monarch.backends.slurm.records import BatchRecord, TaskRecord
from torchx_monarch.backends.slurm.request import SlurmRequest, decode_or_exit
from torchx_monarch.insight import events
from torchx_monarch.model import backoff, job_result
from torchx_monarch.model.host_result import no_retry_reason
from torchx_monarch.model.role_spec import RetryPolicy, RoleSpec
from torchx_monarch.model.state import State
from torchx_monarch.supervisor.signal_pipe import watch_signals
from torchx_monarch.system import safe_files

_STOP_EXTRA = HOST_EXTRA + 5.0
"""Seconds beyond the grace period after which steps that have not stopped are killed."""

_CHECK_INTERVAL = 3.0
"""Seconds between two checks of the records of roles whose replicas do not stop each other."""

_RESIGNAL_AFTER = 1.0
"""Seconds until the stop signal is sent again; the interval doubles each time, up to ``_STOP_EXTRA``."""

_REQUEUE_TIMEOUT = 120.0
"""Seconds in which Slurm ends this process after scancel or a requeue."""

_RESERVE = 64 * 1024
"""Bytes of disk space for the last record: some kilobytes, and more for long lists of nodes and roles."""

_TERMINATED = 128 + signal.SIGTERM
_CANCELLED = "cancelled"
_BY_SLURM = "Slurm told the job to stop"


@dataclass(frozen=True)
class _RunOutcome:
    """How a run of all roles ends.

    Attributes:
        state: SUCCEEDED or FAILED; None while it is open, and if Slurm, or an unknown process, has stopped tasks.
        role: the role that has failed, or was stopped; None without one.
        code: exit code of the root cause.
        final: why the role must not be restarted; empty if it may be.
    """

    state: State | None = None
    role: RoleSpec | None = None
    code: int = _TERMINATED
    final: str = ""


class BatchStep:
    """Run a job to its end.

    Args:
        paths: the job's folder.
        step_pids: the PID of each role's step, in the order of the roles; empty if no step has been started.
    """

    def __init__(self, paths: JobFolder, request: SlurmRequest, step_pids: Sequence[int]) -> None:
        self._paths = paths
        self._request = request
        self._specs = {role.name: role.spec for role in request.roles}
        job_id = os.environ["SLURM_JOB_ID"]
        self._commands = JobCommands(job_id)
        before = records.read(BatchRecord, paths.job, paths.trusted)
        # Preemptions and administrators do not use up retries (TorchX counts all of SLURM_RESTART_COUNT).
        self._retries = RetryBudget(before.retries if before else 0)
        restarts = before.restarts + 1 if before else 0
        self._record = BatchRecord(
            job_id,
            started=(before.started if before else 0.0) or time.time(),
            nodes=[os.environ[macros.nodes_variable(index)] for index in range(len(request.roles))],
            restarts=restarts,
            retries=self._retries.app_retries,
            role_restarts=dict.fromkeys(self._specs, restarts),
            requeues=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        )
        self._steps: dict[str, int] = dict(zip(self._specs, step_pids, strict=False))
        self._ended: dict[str, tuple[int, float]] = {}
        """Exit code and time of the end of each role's step, by the role's name."""
        self._began = dict.fromkeys(self._specs, time.time())
        """When each role's step began, in seconds since the epoch."""
        self._due: dict[str, float] = {}
        """When each role starts that waits for its restart (``time.monotonic``)."""
        self._check_at = 0.0
        self._met = set[str]()
        """The roles whose hosts have met since the role's latest start, by name."""
        self._stop_by: dict[str, float] = {}
        """When the srun of each role is ended that this process has told to stop alone (``time.monotonic``)."""
        self._reset_stop()

    def _reset_stop(self) -> None:
        self._outcome = _RunOutcome()
        self._stopping = ""
        self._resignal_after = 0.0
        self._killing = False
        self._send_stop_at = self._kill_at = float("inf")

    def run(self) -> int:
        """Run the job and return the exit code of the role that decided its result."""
        wake = watch_signals((signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD))
        with contextlib.suppress(OSError):  # a full disk
            safe_files.make_reserve(self._paths.reserve, _RESERVE)
        self._write()
        self._event("job_started", f"job {self._record.job_id} runs on {', '.join(self._record.nodes)}")
        cancelled = self._paths.is_cancelled  # the job was cancelled while Slurm requeued it
        if self._steps:
            signal.raise_signal(signal.SIGCHLD)  # a step may have ended before the handler was set
            if cancelled:
                self._stop(_CANCELLED)
        elif cancelled:
            return self._cancelled()
        else:
            self._start(list(self._specs))
        return self._loop(wake)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _start(self, names: Sequence[str]) -> None:
        environ = {name: value for name, value in os.environ.items() if name not in self._request.not_for_steps}
        for index, name in enumerate(self._specs):
            if name not in names:
                continue
            words = [*self._request.step(index), self._record.job_id, str(self._record.restarts)]
            self._met.discard(name)
            self._stop_by.pop(name, None)
            self._record.role_restarts[name] = self._record.restarts
            # CPython ignores these two signals at start-up, and children inherit that.
            defaults = (signal.SIGPIPE, signal.SIGXFSZ)
            self._steps[name] = os.posix_spawnp(words[0], words, environ, setsigdef=defaults)

    def _loop(self, wake: int) -> int:
        while True:
            numbers = _wait(wake)
            if signal.SIGUSR1 in numbers:
                self._stop(_CANCELLED)
            elif signal.SIGTERM in numbers:
                self._stop(_BY_SLURM)
            for name, step in list(self._steps.items()):
                pid, status = os.waitpid(step, os.WNOHANG)
                if not pid:
                    continue
                del self._steps[name]
                code = job_result.shell_code(os.waitstatus_to_exitcode(status))
                self._ended[name] = code, time.time()
                self._event("role_ended", f"role {name} ended with code {code}", role=name, exit_code=code)
                self._decide()
            self._start_due()
            if not self._steps and not self._due and (result := self._conclude()) is not None:
                return result
            self._end_intolerable()
            if time.monotonic() > self._send_stop_at:
                self._send_stop()
            if time.monotonic() > self._kill_at:
                self._kill()

    # -- decisions -----------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Decide what follows from the end of a role: success, a retry of the role, or the end of the job."""
        if self._stopping:
            return
        decided = reduce(self._snapshot())
        if decided.outcome is None:
            return
        if decided.outcome.state is State.SUCCEEDED:
            self._outcome = _RunOutcome(State.SUCCEEDED)
            self._stop("every role that the job waits for has succeeded")
            return
        cause = decided.cause
        assert cause is not None  # a step that ends with another code than 0 has a replica that has not succeeded
        role = self._specs[cause.role]
        if cause.was_stopped:
            self._outcome = _RunOutcome(None, role, self._ended[role.name][0])
            self._stop(f"role {role.name} was told to stop")
            return
        # srun's own exit code is the highest of all tasks, including those that srun itself stopped.
        record = self._latest(role, [cause.id]).get(cause.id)
        code, final = self._ended[role.name][0], ""
        if record is not None and record.exit_code is not None:
            code = job_result.shell_code(record.exit_code)
            final = no_retry_reason(record.exit_code, record.error)
        if not final and role.retry_policy is RetryPolicy.ROLE and self._retries.take(role):
            self._restart([role.name], f"role {role.name}", role)
            return
        self._outcome = _RunOutcome(State.FAILED, role, code, final)
        self._stop(f"role {role.name} failed")

    def _snapshot(self) -> AppSnapshot:
        """Return the state of the run, in which the replicas of a role run until its step has ended."""
        roles = [RoleSnapshot(spec, self._replicas(spec)) for spec in self._specs.values()]
        return AppSnapshot(self._record.job_id, self._request.name, roles)

    def _replicas(self, role: RoleSpec) -> list[ReplicaSnapshot]:
        code, ended = self._ended.get(role.name, (None, 0.0))
        if not code:
            state = State.RUNNING if code is None else State.SUCCEEDED
            return [ReplicaSnapshot(role.name, replica, state, ended=ended) for replica in range(role.replicas)]
        latest = self._latest(role)
        by_others = role.name not in self._stop_by
        stopped = by_others and any(record.state is State.CANCELLED for record in latest.values())
        return [self._ended_replica(role, replica, latest.get(replica), stopped) for replica in range(role.replicas)]

    def _ended_replica(self, role: RoleSpec, replica: int, record: TaskRecord | None, stopped: bool) -> ReplicaSnapshot:
        """Return a replica of a role whose step has ended.

        Args:
            record: the record of its latest start; None if its task has written none.
            stopped: whether a replica of the role was asked to stop, though not by this process.
        """
        ended = (record.ended if record else None) or self._ended[role.name][1]
        if record is not None and record.state is State.SUCCEEDED:
            return ReplicaSnapshot(role.name, replica, State.SUCCEEDED, ended=ended)
        failed = record is not None and record.state is State.FAILED and record.exit_code is not None
        # A stopping host stops the others: some may end by SIGTERM before Slurm's signal reaches their task.
        by_signal = record is None or job_result.shell_code(record.exit_code or 0) == _TERMINATED
        return ReplicaSnapshot(
            role.name,
            replica,
            State.FAILED,
            ended=ended,
            error=(record.error if record else None) or "",
            was_stopped=(record is not None and record.state is State.CANCELLED)
            or (stopped and (not failed or by_signal)),
            is_error_lost=not failed,
        )

    def _latest(self, role: RoleSpec, replicas: Sequence[int] = ()) -> dict[int, TaskRecord]:
        """Read the records of a role's latest start, by replica; replicas without a record are left out.

        Args:
            replicas: the replicas to read; empty for all.
        """
        now = self._record.role_restarts[role.name]
        every = {
            replica: records.read_task(self._paths, role.name, replica) for replica in replicas or range(role.replicas)
        }
        return {
            replica: record for replica, record in every.items() if record is not None and record.job_restart == now
        }

    def _end_intolerable(self) -> None:
        """Stop the steps in which more replicas have failed than their role tolerates, and which would go on.

        srun stops the steps of other roles (--kill-on-bad-exit). Monarch's hosts stop each other once they have met.
        """
        if self._stopping or time.monotonic() < self._check_at:
            return
        self._check_at = time.monotonic() + _CHECK_INTERVAL
        for name, step in self._steps.items():
            role = self._specs[name]
            if name in self._met or not (role.runs_hosts or role.is_elastic):
                continue
            latest = self._latest(role)
            failed = {replica for replica, record in latest.items() if record.state is State.FAILED}
            if role.runs_hosts and self._have_met(name, latest.get(0)):
                self._met.add(name)
            elif not role.tolerates(failed):
                self._stop_role(name, step)

    def _stop_role(self, name: str, step: int) -> None:
        """Signal the tasks of a role to stop; if they have not stopped after the grace period, end its srun."""
        if name not in self._stop_by:
            self._stop_by[name] = time.monotonic() + self._request.grace + _STOP_EXTRA
            text = f"role {name} cannot succeed; its other replicas have {self._request.grace:g} s to end"
            self._event("stop", text, role=name)
        if time.monotonic() < self._stop_by[name]:
            self._commands.signal_tasks(list(self._specs).index(name) if len(self._specs) > 1 else None)
        else:
            os.kill(step, signal.SIGTERM)

    def _have_met(self, name: str, first: TaskRecord | None) -> bool:
        """Return whether the hosts of a role have met since its replica 0, whose record is ``first``, was started."""
        since = first.started if first is not None else None
        return since is not None and events.have_hosts_met(self._paths.events, name, since, below=self._paths.trusted)

    def _conclude(self) -> int | None:
        """Handle the end of the last step: return the exit code of the job, or None if all roles were restarted."""
        outcome, role = self._outcome, self._outcome.role
        if outcome.state is State.SUCCEEDED:
            return self._finish(State.SUCCEEDED, "", 0)
        if self._stopping == _CANCELLED:
            return self._cancelled()
        if outcome.state is None or role is None:
            return self._ended_from_outside(outcome.code)
        message = f"role {role.name} ended with exit code {outcome.code}{self._container_failure(role)}"
        if outcome.final:
            message += f"; not started again: {outcome.final}"
        elif role.retry_policy is RetryPolicy.APPLICATION and self._retries.take(role):
            self._record.retries = self._retries.app_retries
            if self._request.retry == "requeue":
                self._write()
                return self._requeue(message, outcome.code)
            self._reset_stop()
            self._restart(list(self._specs), "the app", role)
            return None
        return self._finish(State.FAILED, message, outcome.code)

    def _container_failure(self, role: RoleSpec) -> str:
        """Return the end of a message about a role's failure: none of its containers has started; empty if one has."""
        container = next(
            role_request.container for role_request in self._request.roles if role_request.name == role.name
        )
        if container is None or self._latest(role):
            return ""
        said = last_error(self._paths.job_log)
        return f": no container of {container.image} has started" + (f": {said}" if said else "")

    def _cancelled(self) -> int:
        code = self._finish(State.CANCELLED, "cancelled", _TERMINATED)
        # Only scancel gives the job the state CANCELLED in Slurm.
        self._commands.cancel()
        time.sleep(_REQUEUE_TIMEOUT)
        return code

    def _await_tasks(self) -> None:
        """Wait for the tasks to end. Slurm has ended srun, and kills its tasks when this process ends."""
        places = [(role.name, replica) for role in self._specs.values() for replica in range(role.replicas)]
        until = time.monotonic() + self._request.grace + _STOP_EXTRA
        for place in places:
            while (record := records.read_task(self._paths, *place)) and record.state is State.RUNNING:
                if time.monotonic() > until:
                    return
                time.sleep(0.2)

    def _ended_from_outside(self, code: int) -> int:
        """Handle a stop by Slurm itself: a time limit, a preemption or a plain scancel. Return the exit code."""
        self._await_tasks()
        if self._request.requeue and self._commands.state() == RUNNING:
            return self._requeue("told to stop by Slurm", code)
        self._record.outside = True
        return self._finish(State.FAILED, "told to stop by Slurm (see the job's state there)", code)

    def _restart(self, names: Sequence[str], what: str, failed: RoleSpec) -> None:
        """Start roles again, after a delay if they have failed before."""
        lived = max(0.0, self._ended[failed.name][1] - self._began[failed.name])
        delay = self._retries.delay(failed, lived)
        self._record.restarts += 1
        role: dict[str, str] = {"role": names[0]} if len(names) == 1 else {}
        text = f"{what} is restarted (restart {self._record.restarts})"
        self._event("restart", f"{text}; {backoff.describe(delay, lived)}" if delay else text, **role)
        for name in names:
            self._ended.pop(name, None)  # it counts as running
            self._record.role_restarts[name] = self._record.restarts  # the records of its last start no longer count
            self._due[name] = time.monotonic() + delay
        if delay:
            self._write()
        else:
            self._start_due()

    def _start_due(self) -> None:
        """Start the roles whose restart is due."""
        now = time.monotonic()
        if names := [name for name, when in self._due.items() if when <= now]:
            for name in names:
                del self._due[name]
                self._began[name] = time.time()
            self._start(names)
            self._write()

    def _requeue(self, message: str, code: int) -> int:
        self._event("requeue", f"{message}; the job goes back into the queue")
        if self._commands.requeue():
            time.sleep(_REQUEUE_TIMEOUT)
        message = f"{message}; it could not be queued again (see {self._paths.job_log})"
        return self._finish(State.FAILED, message, code)

    # -- stopping ------------------------------------------------------------------------------------------------------

    def _stop(self, reason: str) -> None:
        """Stop all tasks. Cancellation overrides an earlier reason; any other later reason is ignored."""
        if self._stopping == _CANCELLED or (self._stopping and reason != _CANCELLED):
            return
        self._stopping = reason
        self._due.clear()
        if reason == _CANCELLED:
            self._outcome = _RunOutcome()
        if self._steps:
            self._event("stop", f"{reason}; what still runs has {self._request.grace:g} s to end")
            self._kill_at = time.monotonic() + self._request.grace + _STOP_EXTRA
            self._resignal_after = _RESIGNAL_AFTER
            self._send_stop()

    def _send_stop(self) -> None:
        """Signal all tasks to stop, and schedule the next signal: a task that is starting may miss the first."""
        # If Slurm is ending the job, it has signalled the tasks already, and scancel would retry for a long time.
        if self._stopping != _BY_SLURM or self._commands.state() == RUNNING:
            self._commands.signal_tasks()
        self._send_stop_at = time.monotonic() + self._resignal_after
        self._resignal_after = min(2 * self._resignal_after, _STOP_EXTRA)

    def _kill(self) -> None:
        """Send SIGTERM to the sruns that still run, which makes them kill their tasks; on the next call, SIGKILL."""
        say("steps did not stop in time: killing them")
        for step in self._steps.values():
            os.kill(step, signal.SIGKILL if self._killing else signal.SIGTERM)
        self._killing = True
        self._kill_at = time.monotonic() + _STOP_EXTRA

    # -- the record ----------------------------------------------------------------------------------------------------

    def _finish(self, state: State, message: str, code: int) -> int:
        self._record.state, self._record.msg, self._record.ended = state, message, time.time()
        self._write(is_last=True)
        self._event("ended", f"{state}: {message}" if message else str(state))
        return code

    def _write(self, *, is_last: bool = False) -> None:
        """Write the record, the last one on a full disk, too. A loss is no reason to end the job: it is logged."""
        content = asdict(self._record)
        try:
            if is_last:
                state_files.write_last_json(self._paths.job, content, self._paths.reserve)
            else:
                state_files.write_json(self._paths.job, content)
        except OSError as error:
            say(f"the record {json.dumps(content, default=str)} could not be written: {error}")

    def _event(self, kind: str, message: str, **fields: object) -> None:
        say(message)
        events.append(self._paths.events, kind, message, seconds=None, **fields)


def _wait(wake: int) -> bytes:
    """Wait at most 1 s for signals and return their numbers."""
    select.select([wake], [], [], 1.0)
    try:
        return os.read(wake, 4096)
    except BlockingIOError:
        return b""


def main(argv: list[str]) -> NoReturn:
    """Run the job whose folder is the first argument; the other arguments are the PIDs of its steps."""
    step_pids = [int(word) for word in argv[1:]]
    paths = JobFolder(argv[0])
    request = decode_or_exit(paths, read_request(paths, os.environ.get("SLURMD_NODENAME") or os.uname().nodename))
    sys.exit(BatchStep(paths, request, step_pids).run())
