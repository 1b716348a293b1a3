# SPDX-License-Identifier: BSD-3-Clause
"""One node's task: run the replica, write its logs and its record, restart it if the retry policy is REPLICA.

It runs as ``srun ... entrypoint.py task FOLDER ROLE JOBID RESTART``; SLURM_PROCID is the replica's number.
``task_start`` has the code that runs first.

SIGURG, which programs ignore by default, requests a stop: srun and scancel can only signal all processes of a step. The
task then sends SIGTERM to the replica's host alone, which stops its own ranks. Slurm's own SIGTERM (a time limit, a
preemption, a plain scancel) has the same effect.
"""

from __future__ import annotations

import os
import select
import selectors
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import NoReturn

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.state import RetryBudget
from torchx_monarch.backends.slurm.in_job.task_start import STOP_SIGNALS, StartedTask
from torchx_monarch.backends.slurm.records import TaskRecord
from torchx_monarch.backends.slurm.request import SlurmRequest, decode_or_exit
from torchx_monarch.model import backoff, job_result
from torchx_monarch.model.role_spec import RetryPolicy
from torchx_monarch.model.state import State
from torchx_monarch.supervisor.graceful_stop import GracefulStop
from torchx_monarch.supervisor.records import ReplicaRequest
from torchx_monarch.supervisor.replica import Replica
from torchx_monarch.supervisor.stopped_hosts import StoppedHosts
from torchx_monarch.system import processes, run_dirs

_TOLD_WITHIN = 0.5
"""The most seconds between a replica's death by SIGTERM and the same signal to this task, if Slurm sends both."""

_CHECK_STOPPED_EVERY = 5.0
"""Seconds between two checks whether the host is stopped (SIGSTOP)."""


class Task:
    """Run one replica."""

    def __init__(self, started_task: StartedTask, request: SlurmRequest) -> None:
        self._started_task = started_task
        self._grace = request.grace
        self._spec = next(role.spec for role in request.roles if role.name == started_task.role)
        self._retries = RetryBudget()
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._graceful_stop: GracefulStop | None = None
        self._stop_requested = False
        self._stopped = StoppedHosts(request.lease, _CHECK_STOPPED_EVERY)
        self._waits = False
        """Whether the replica waits for its restart."""
        self._wake = started_task.wake
        self._selector = selectors.DefaultSelector()
        restart = started_task.restart
        self._record = TaskRecord(
            started_task.replica, restarts=restart, job_restart=restart, hostname=started_task.node
        )
        only = ReplicaRequest(started_task.command, {}, started_task.cwd)
        self._replica = Replica(
            0, self._spec, only, self._record, started_task.log_dir, started_task.environ, self._selector
        )

    def run(self) -> int:
        """Run the replica to its end and return its exit code, 128+n for signal n."""
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        if self._started_task.restart:
            self._replica.logs.say(f"replica {self._replica.name} is restarted (restart {self._started_task.restart})")
        if self._started_task.pid is None:
            self._start()
        else:
            self._replica.adopt(self._started_task.pid, self._started_task.started, self._started_task.pipes)
            self._write()
        self._look_for_stopped()
        while self._replica.alive or self._waits:
            self._turn(self._timeout())
        for pause in processes.terminate(lambda: processes.own_descendants(self._started_task.job)):
            self._turn(pause)
        return self._end()

    def _turn(self, timeout: float | None) -> None:
        for key, _ in self._selector.select(timeout):
            if key.fd == self._wake:
                self._on_signals(os.read(self._wake, 4096))
            else:
                self._replica.read(key.fd)
        now = time.monotonic()
        self._replica.logs.flush_old(now)
        due = [call for when, call in self._timers if when <= now]
        self._timers = [(when, call) for when, call in self._timers if when > now]
        for call in due:
            call()

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call the function when ``time.monotonic()`` reaches ``when``."""
        self._timers.append((when, call))

    def _look_for_stopped(self) -> None:
        """Kill a host that has been stopped for too long. A job that Slurm suspends has its tasks stopped as well."""
        pid = self._replica.record.pid
        if self._replica.alive and pid is not None and self._graceful_stop is None:
            for why in self._stopped.check([pid]).values():
                self._replica.kill(why)
        self.at(time.monotonic() + _CHECK_STOPPED_EVERY, self._look_for_stopped)

    def _start(self) -> None:
        self._waits = False
        self._replica.start()
        self._write()

    def _timeout(self) -> float | None:
        flush = self._replica.logs.next_flush()
        first = min([when for when, _ in self._timers] + ([] if flush is None else [flush]), default=None)
        return None if first is None else max(0.0, first - time.monotonic())

    def _on_signals(self, numbers: bytes) -> None:
        is_stop = bool(STOP_SIGNALS & set(numbers))
        self._stop_requested = self._stop_requested or is_stop
        if signal.SIGCHLD in numbers:
            processes.reap(self._on_exit)
        if is_stop and self._waits:
            self._waits, self._timers = False, []
            self._record.state = State.CANCELLED
        if is_stop and self._graceful_stop is None and self._replica.alive:
            self._graceful_stop = GracefulStop(self, [self._replica], lambda: None, grace=self._grace)
            self._graceful_stop.begin()

    def _on_exit(self, pid: int, code: int) -> None:
        replica = self._replica
        if pid != replica.record.pid:
            return  # an orphan process: the task is a subreaper
        if code in (-signal.SIGTERM, 128 + signal.SIGTERM) and self._await_stop_request():
            replica.stopping = True
        replica.exited(code)
        if replica.succeeded or replica.stopping or replica.final or self._spec.retry_policy is not RetryPolicy.REPLICA:
            return
        if self._retries.take(self._spec, replica.record.id):
            lived = max(0.0, (replica.record.ended or 0.0) - (replica.record.started or 0.0))
            # Its record stays RUNNING meanwhile: FAILED is for a replica that is not restarted.
            replica.prepare_restart()
            if delay := self._retries.delay(self._spec, lived, replica.record.id):
                replica.logs.say(backoff.describe(delay, lived))
                self._waits = True
                self.at(time.monotonic() + delay, self._start)
            else:
                self._start()

    def _await_stop_request(self) -> bool:
        """Whether a stop signal has arrived or arrives shortly: Slurm's SIGTERM reaches all processes, one by one."""
        until = time.monotonic() + _TOLD_WITHIN
        while not self._stop_requested and (left := until - time.monotonic()) > 0:
            if select.select([self._wake], [], [], left)[0]:
                self._stop_requested = bool(STOP_SIGNALS & set(os.read(self._wake, 4096)))
        return self._stop_requested

    def _end(self) -> int:
        left = processes.kill_descendants(self._started_task.job)
        if left:
            self._replica.logs.say(f"these processes could not be killed: {', '.join(map(str, left))}")
        self._replica.close_pipes()
        self._replica.logs.close()
        run_dirs.remove_tree(self._started_task.run_dir)
        self._write()
        assert self._record.exit_code is not None
        return job_result.shell_code(self._record.exit_code)

    def _write(self) -> None:
        path = self._started_task.paths.record(self._started_task.role, self._started_task.replica)
        try:
            state_files.write_json(path, asdict(self._record))
        except OSError as error:
            print(f"the record {self._record} could not be written: {error}", file=sys.stderr, flush=True)


def run(started_task: StartedTask) -> NoReturn:
    """Run a started task to its end and exit the process with the replica's exit code."""
    sys.exit(Task(started_task, decode_or_exit(started_task.paths, started_task.request)).run())
