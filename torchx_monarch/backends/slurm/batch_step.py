# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The batch step: run a step for each role, retry failures, stop steps, record the job's result.

It runs as ``entrypoint.py job FOLDER [PID ...]`` on the first node of the job. The PIDs are the roles' steps, if the
batch script has started them. Each task of a job array has its own, independent batch step.

SIGUSR1 requests cancellation; SIGTERM comes from Slurm. On either, the batch step signals all tasks to stop (see
``task``) and gives them the grace period. If Slurm itself restarts the job, as after a lost node, it ends this process.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from torchx_monarch.backends import outcome
from torchx_monarch.backends.local import state_files
from torchx_monarch.backends.slurm import array, macros, records
from torchx_monarch.backends.slurm.folder import JobFolder, read_request, run_folder
from torchx_monarch.backends.slurm.records import BatchRecord, SlurmReplica
from torchx_monarch.backends.slurm.request import SlurmRequest, SlurmRole, decode_or_exit
from torchx_monarch.insight import events
from torchx_monarch.model import job_result

_COMMAND_TIMEOUT = 60.0
_STOP_EXTRA = 15.0
"""Seconds beyond the grace period after which steps that have not stopped are killed."""

_CHECK_INTERVAL = 3.0
"""Seconds between two checks of the records of an elastic role whose replicas do not stop each other."""

_RESIGNAL_AFTER = 1.0
"""Seconds until the stop signal is sent again; the interval doubles each time, up to ``_STOP_EXTRA``."""

_REQUEUE_TIMEOUT = 120.0
"""Seconds in which Slurm ends this process after scancel or a requeue."""

_TERMINATED = 128 + signal.SIGTERM
_RUNNING = "RUNNING"
_BY_SLURM = "Slurm told the job to stop"


class BatchStep:
    """Run a job, or one array task, to its end.

    Args:
        paths: the folder of the job or the array task.
        request: the submitted request.
        step_pids: the PID of each role's step, in the order of the roles; empty if no step has been started.
    """

    def __init__(self, paths: JobFolder, request: SlurmRequest, step_pids: Sequence[int]) -> None:
        self._paths = paths
        self._request = request
        self._is_array = bool(request.sbatch.get("array"))
        self._job_id = array.own_id(os.environ) if self._is_array else os.environ["SLURM_JOB_ID"]
        before = records.read(BatchRecord, paths.job)
        self._restarts = before.restarts + 1 if before else 0
        self._role_retries = dict.fromkeys((role.name for role in request.roles), 0)
        # Preemptions and administrators do not use up retries (TorchX counts all of SLURM_RESTART_COUNT).
        self._app_retries = before.retries if before else 0
        self._role_restarts: dict[str, int] = dict.fromkeys(self._role_retries, self._restarts)
        self._steps: dict[str, int] = dict(zip(self._role_retries, step_pids, strict=False))
        self._codes: dict[str, int] = {}
        self._succeeded: set[str] = set()
        self._check_at = 0.0
        self._nodes = [os.environ[macros.nodes_variable(index)] for index in range(len(request.roles))]
        self._reset_stop()
        self._state: dict[str, Any] = {
            "job_id": self._job_id,
            "started": time.time(),
            "restarts": self._restarts,
            "retries": self._app_retries,
            "role_restarts": self._role_restarts,
        }
        self._wake, self._signalled = os.pipe()

    def _reset_stop(self) -> None:
        self._stopping = ""
        self._resignal_after = 0.0
        self._killing = False
        self._send_stop_at = self._kill_at = float("inf")

    def run(self) -> int:
        """Run the job and return the exit code of the role that decided its result."""
        for end in (self._wake, self._signalled):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._signalled, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        self._state["nodes"] = self._nodes
        self._write()
        self._event("job_started", f"job {self._job_id} runs on {', '.join(self._nodes)}")
        cancelled = self._paths.is_cancelled  # the job was cancelled while Slurm requeued it
        if self._steps:
            os.write(self._signalled, bytes([signal.SIGCHLD]))  # a step may have ended before the handler was set
            if cancelled:
                self._stop("cancelled")
        elif cancelled:
            return self._cancelled()
        else:
            self._start(list(self._role_retries))
        return self._loop()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _start(self, names: list[str]) -> None:
        environ = {name: value for name, value in os.environ.items() if name not in self._request.not_for_steps}
        for index, role in enumerate(self._request.roles):
            if role.name not in names:
                continue
            words = [*self._request.step(index), self._job_id, str(self._restarts)]
            self._codes.pop(role.name, None)
            self._succeeded.discard(role.name)
            self._role_restarts[role.name] = self._restarts
            # CPython ignores these two signals at start-up, and children inherit that.
            defaults = (signal.SIGPIPE, signal.SIGXFSZ)
            self._steps[role.name] = os.posix_spawnp(words[0], words, environ, setsigdef=defaults)

    def _loop(self) -> int:
        while True:
            numbers = self._wait()
            if signal.SIGUSR1 in numbers:
                self._stop("cancelled")
            elif signal.SIGTERM in numbers:
                self._stop(_BY_SLURM)
            for name, step in list(self._steps.items()):
                pid, status = os.waitpid(step, os.WNOHANG)
                if not pid:
                    continue
                del self._steps[name]
                self._codes[name] = job_result.shell_code(os.waitstatus_to_exitcode(status))
                self._event("role_ended", f"role {name} ended with code {self._codes[name]}", role=name)
                self._on_role_end(name)
            if not self._steps and (code := self._conclude()) is not None:
                return code
            self._end_intolerable()
            if time.monotonic() > self._send_stop_at:
                self._send_stop()
            if time.monotonic() > self._kill_at:
                self._kill()

    def _wait(self) -> bytes:
        """Wait at most 1 s for signals and return their numbers."""
        select.select([self._wake], [], [], 1.0)
        try:
            return os.read(self._wake, 4096)
        except BlockingIOError:
            return b""

    # -- decisions -----------------------------------------------------------------------------------------------------

    def _on_role_end(self, name: str) -> None:
        """Decide what follows from the end of a role: success, a retry of the role, or the end of the job."""
        code = self._codes[name]
        role = next(role for role in self._request.roles if role.name == name)
        if self._stopping:
            return
        if code == 0 or self._tolerates(role, self._left_unfinished(role)):
            self._succeeded.add(name)
            if all(one.name in self._succeeded for one in outcome.awaited(self._request.roles)):
                self._state.update(verdict="SUCCEEDED")
                self._stop("every role that the job waits for has succeeded")
            return
        cause = self._cause(name)
        may_again = cause is not None and not cause[1]
        if may_again and role.retry_policy == "ROLE" and self._role_retries[name] < role.max_retries:
            self._role_retries[name] += 1
            self._restart([name], f"role {name}")
            return
        verdict, why = ("STOPPED", "") if cause is None else ("FAILED", cause[1])
        self._state.update(verdict=verdict, role=name, code=cause[0] if cause else code, final=why)
        self._stop(f"role {name} failed" if cause is not None else f"role {name} was told to stop")

    def _tolerates(self, role: SlurmRole, failed: set[int]) -> bool:
        """Whether a role is elastic and tolerates the failure of these replicas."""
        return role.policy.elastic and role.policy.tolerates(failed)

    def _latest(self, role: SlurmRole) -> dict[int, SlurmReplica]:
        """Read the records of a role's latest start, by replica; replicas without a record are left out."""
        now = self._role_restarts[role.name]
        every = {
            replica: records.read_replica(self._paths.record(role.name, replica)) for replica in range(role.replicas)
        }
        return {replica: one for replica, one in every.items() if one is not None and one.job_restart == now}

    def _in_state(self, role: SlurmRole, state: str) -> set[int]:
        """Return the replicas whose latest start has this state, by their records."""
        return {replica for replica, one in self._latest(role).items() if one.state == state}

    def _left_unfinished(self, role: SlurmRole) -> set[int]:
        return set(range(role.replicas)) - self._in_state(role, "SUCCEEDED")

    def _end_intolerable(self) -> None:
        """Stop the step of an elastic role in which more replicas have failed than it tolerates.

        srun stops the steps of other roles (--kill-on-bad-exit), and Monarch's hosts stop each other.
        """
        if self._stopping or time.monotonic() < self._check_at:
            return
        self._check_at = time.monotonic() + _CHECK_INTERVAL
        for role in self._request.roles:
            step = self._steps.get(role.name)
            if step is None or role.ends_together or not role.policy.elastic:
                continue
            if not role.policy.tolerates(self._in_state(role, "FAILED")):
                os.kill(step, signal.SIGTERM)

    def _conclude(self) -> int | None:
        """Handle the end of the last step: return the exit code of the job, or None if all roles were restarted."""
        verdict, code, name = self._state.get("verdict"), self._state.get("code", 1), self._state.get("role", "")
        if verdict == "SUCCEEDED":
            return self._finish("SUCCEEDED", "", 0)
        if self._stopping == "cancelled":
            return self._cancelled()
        if verdict != "FAILED":
            return self._ended_from_outside(code if verdict else _TERMINATED)
        role = next(role for role in self._request.roles if role.name == name)
        message = f"role {name} ended with exit code {code}"
        if final := self._state["final"]:
            message += f"; not started again: {final}"
        elif role.retry_policy == "APPLICATION" and self._app_retries < role.max_retries:
            self._app_retries += 1
            self._state["retries"] = self._app_retries
            if self._request.retry == "requeue":
                self._write()
                return self._requeue(message, code)
            self._reset_stop()
            for key in ("verdict", "role", "code", "final"):
                self._state.pop(key, None)
            self._restart(list(self._role_retries), "the app")
            return None
        return self._finish("FAILED", message, code)

    def _cancelled(self) -> int:
        code = self._finish("CANCELLED", "cancelled", _TERMINATED)
        # Only scancel gives the job the state CANCELLED in Slurm.
        self._command("scancel", self._job_id)
        time.sleep(_REQUEUE_TIMEOUT)
        return code

    def _cause(self, name: str) -> tuple[int, str] | None:
        """Find the first replica to fail in a role.

        srun's own exit code does not tell: it is the highest of all tasks, including those that srun itself stopped.

        Returns:
            The replica's exit code, and why it must not be restarted (``job_result.no_retry_reason``; empty if it may
            be). None if tasks were signalled to stop and none failed by itself.
        """
        role = next(role for role in self._request.roles if role.name == name)
        ours = self._latest(role).values()
        told = any(one.state == "CANCELLED" for one in ours)
        failed = [
            (
                one.ended or 0.0,
                job_result.shell_code(one.exit_code),
                job_result.no_retry_reason(one.exit_code, one.error),
            )
            for one in ours
            if one.state == "FAILED" and one.exit_code is not None
        ]
        # A stopping host stops the others: some may end by SIGTERM before Slurm's signal reaches their task.
        failed = [each for each in failed if not told or each[1] != _TERMINATED]
        if failed:
            return min(failed)[1:]
        return None if told else (self._codes[name], "")

    def _await_tasks(self) -> None:
        """Wait for the tasks to end. Slurm has ended srun, and kills its tasks when this process ends."""
        places = [(role.name, replica) for role in self._request.roles for replica in range(role.replicas)]
        until = time.monotonic() + self._request.grace + _STOP_EXTRA
        for place in places:
            while (one := records.read_replica(self._paths.record(*place))) and one.state == _RUNNING:
                if time.monotonic() > until:
                    return
                time.sleep(0.2)

    def _ended_from_outside(self, code: int) -> int:
        """Handle a stop by Slurm itself: a time limit, a preemption or a plain scancel. Return the exit code."""
        self._await_tasks()
        if self._request.requeue and self._slurm_state() == _RUNNING:
            return self._requeue("told to stop by Slurm", code)
        self._state["outside"] = True
        return self._finish("FAILED", "told to stop by Slurm (see the job's state there)", code)

    def _restart(self, names: list[str], what: str) -> None:
        self._restarts += 1
        self._state["restarts"] = self._restarts
        self._event("restart", f"{what} is restarted (restart {self._restarts})")
        self._start(names)
        self._write()

    def _requeue(self, message: str, code: int) -> int:
        self._event("requeue", f"{message}; the job goes back into the queue")
        if self._command("scontrol", "requeue", self._job_id):
            time.sleep(_REQUEUE_TIMEOUT)
        return self._finish("FAILED", f"{message}; it could not be queued again (see {self._paths.job_log})", code)

    # -- stopping ------------------------------------------------------------------------------------------------------

    def _stop(self, reason: str) -> None:
        """Stop all tasks. Cancellation overrides an earlier reason; any other later reason is ignored."""
        if self._stopping == "cancelled" or (self._stopping and reason != "cancelled"):
            return
        self._stopping = reason
        if reason == "cancelled":
            self._state.pop("verdict", None)
        if self._steps:
            self._event("stop", f"{reason}; what still runs has {self._request.grace:g} s to end")
            self._kill_at = time.monotonic() + self._request.grace + _STOP_EXTRA
            self._resignal_after = _RESIGNAL_AFTER
            self._send_stop()

    def _send_stop(self) -> None:
        """Signal all tasks to stop, and schedule the next signal: a task that is starting may miss the first."""
        # If Slurm is ending the job, it has signalled the tasks already, and scancel would retry for a long time.
        if self._stopping != _BY_SLURM or self._slurm_state() == _RUNNING:
            self._signal_steps()
        self._send_stop_at = time.monotonic() + self._resignal_after
        self._resignal_after = min(2 * self._resignal_after, _STOP_EXTRA)

    def _signal_steps(self) -> None:
        if not self._is_array:
            self._command("scancel", "--signal=URG", self._job_id)
            return
        # Slurm is slow to signal an array task as a whole (``commands._TOLD_WITHIN``), but not its steps.
        listed = self._asked("squeue", "--steps", "--noheader", "--format=%i", f"--jobs={self._job_id}")
        if steps := [step for step in listed.split() if step.rpartition(".")[2].isdigit()]:
            self._command("scancel", "--signal=URG", *steps)

    def _kill(self) -> None:
        """Send SIGTERM to the sruns that still run, which makes them kill their tasks; on the next call, SIGKILL."""
        print("steps did not stop in time: killing them", flush=True)
        for step in self._steps.values():
            os.kill(step, signal.SIGKILL if self._killing else signal.SIGTERM)
        self._killing = True
        self._kill_at = time.monotonic() + _STOP_EXTRA

    def _command(self, *words: str) -> bool:
        import subprocess  # imported late: its import would delay the start of the steps

        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT, check=False)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"{' '.join(words)}: {error}", flush=True)
            return False
        if done.returncode:
            print(f"{' '.join(words)}: {done.stderr.strip()}", flush=True)
        return done.returncode == 0

    def _slurm_state(self) -> str:
        said = self._asked("squeue", "--noheader", "--format=%T", f"--jobs={self._job_id}")
        return (said.split() or [""])[0]

    def _asked(self, *words: str) -> str:
        import subprocess

        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT, check=False)
        except (OSError, subprocess.SubprocessError):
            return ""
        return done.stdout

    # -- what is known -------------------------------------------------------------------------------------------------

    def _finish(self, state: str, message: str, code: int) -> int:
        self._state.update(state=state, msg=message, code=code, ended=time.time())
        self._write()
        if self._is_array:
            with contextlib.suppress(OSError):
                os.utime(self._paths.whole.root)  # prune() goes by the mtime of the whole job's folder
        self._event("ended", f"{state}: {message}" if message else state)
        return code

    def _write(self) -> None:
        state_files.write_json(self._paths.job, self._state)

    def _event(self, kind: str, message: str, **fields: str) -> None:
        print(message, flush=True)
        events.append(self._paths.events, kind, message, seconds=None, **fields)
        if self._is_array and kind in ("job_started", "ended"):
            message = f"array task {os.path.basename(self._paths.root)}: {message}"
            events.append(self._paths.whole.events, kind, message, seconds=None)


def main(argv: list[str]) -> NoReturn:
    """Run the job whose folder is the first argument; the other arguments are the PIDs of its steps."""
    step_pids = [int(word) for word in argv[1:]]
    whole = JobFolder(argv[0])
    data = read_request(whole, os.environ.get("SLURMD_NODENAME") or os.uname().nodename)
    request = decode_or_exit(whole, data)
    paths = run_folder(whole, data, os.environ)
    os.makedirs(paths.root, mode=0o700, exist_ok=True)
    sys.exit(BatchStep(paths, request, step_pids).run())
