# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""One node's task: runs the replica, keeps its logs and its record, starts it again where the policy says so.

``srun ... start.py task FOLDER ROLE JOBID RESTART``; SLURM_PROCID says which replica it is.

SIGURG, which no program minds, says that the replica is to stop: srun and scancel know signals for all processes of a
step only, and this task passes SIGTERM on to the replica's host alone, which stops its own ranks in good order. Slurm's
own SIGTERM (a time limit, a preemption, a plain scancel) means the same here.
"""

from __future__ import annotations

import os
import select
import selectors
import signal
import sys
import time
from dataclasses import asdict
from typing import NoReturn

from torchx_monarch import errors, processes
from torchx_monarch.backends.local import folder as folders
from torchx_monarch.backends.local import store
from torchx_monarch.backends.local.replica import Replica
from torchx_monarch.backends.local.request import ReplicaRequest
from torchx_monarch.backends.local.request import RoleRequest as LocalRole
from torchx_monarch.backends.local.status import ReplicaRecord
from torchx_monarch.backends.slurm.folder import JobFolder
from torchx_monarch.backends.slurm.request import (
    RANK0_HOST,
    RoleRequest,
    SlurmRequest,
    first_node,
    nodes_variable,
    replica0_variable,
)

_KILL_EXTRA = 5.0
"""Seconds beyond the grace: a host kills its ranks itself when the grace is over."""

_TOLD_WITHIN = 0.5
"""Seconds between the death of a replica by SIGTERM and the same signal to this task, if both come from Slurm."""

_STOP_SIGNALS = {signal.SIGTERM, signal.SIGURG, signal.SIGINT, signal.SIGHUP}


class Task:
    """Runs one replica.

    Args:
        paths: the job's folder.
        request: what is in it.
        role: this task's.
        replica: which replica of it.
        app_id: the job's id.
        restart: how often the job has been started again before.
    """

    def __init__(
        self, paths: JobFolder, request: SlurmRequest, role: RoleRequest, replica: int, app_id: str, restart: int
    ) -> None:
        self._paths = paths
        self._grace = request.grace
        self._role = role
        self._restart = restart
        self._retries = role.max_retries if role.retry_policy == "REPLICA" else 0
        self._kill_at = float("inf")
        self._told = False
        self._wake = -1
        self._selector = selectors.DefaultSelector()
        self._node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
        command, env = role.filled(app_id, replica)
        log_dir = paths.replica_logs(role.name, replica)
        os.makedirs(log_dir, mode=0o700, exist_ok=True)
        self._record_path = paths.record(role.name, replica)
        self._run_dir = _run_dir()
        self._job = f"slurm:{app_id}:{os.path.basename(paths.root)}"
        # Where the replicas 0 are; the lists are no program's business.
        nodes = [os.environ.pop(nodes_variable(index)) for index in range(len(request.roles))]
        first = {replica0_variable(index): first_node(each) for index, each in enumerate(nodes)}
        environ = {
            **os.environ,
            **first,
            RANK0_HOST: first[replica0_variable(0)],
            **env,
            processes.MARKER: self._job,
            "MONARCH_LOG_DIR": log_dir,
            "MONARCH_RUN_DIR": self._run_dir,
            "MONARCH_EVENTS": paths.events,
        }
        environ.setdefault("TORCHELASTIC_ERROR_FILE", paths.error_file(role.name, replica))
        given = LocalRole(role.name, [ReplicaRequest(command, env, role.cwd)], role.max_retries, role.retry_policy)
        record = ReplicaRecord(id=replica, restarts=restart)
        self._replica = Replica(0, given, given.replicas[0], record, log_dir, environ, self._selector)

    def run(self) -> int:
        """Run it to its end; its exit code, as a shell has it."""
        processes.become_subreaper()
        self._wake, signalled = os.pipe()
        for end in (self._wake, signalled):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
        # Those that only reach the ranks are named because they would end this process otherwise.
        for number in (signal.SIGCHLD, *_STOP_SIGNALS, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda *_: None)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        if self._restart:
            self._replica.logs.say(f"replica {self._replica.name} is started again (restart {self._restart})")
        self._start()
        while self._replica.alive:
            for key, _ in self._selector.select(self._timeout()):
                if key.fd == self._wake:
                    self._on_signals(os.read(self._wake, 4096))
                else:
                    self._replica.read(key.fd)
            now = time.monotonic()
            self._replica.logs.flush_old(now)
            if now >= self._kill_at:
                self._kill_at = float("inf")
                self._replica.kill()
        return self._end()

    def _start(self) -> None:
        self._replica.start()
        self._write()

    def _timeout(self) -> float | None:
        flush = self._replica.logs.next_flush()
        first = min(self._kill_at, flush if flush is not None else float("inf"))
        return None if first == float("inf") else max(0.0, first - time.monotonic())

    def _on_signals(self, numbers: bytes) -> None:
        self._told = self._told or bool(_STOP_SIGNALS & set(numbers))
        if signal.SIGCHLD in numbers:
            processes.reap(self._on_exit)
        if _STOP_SIGNALS & set(numbers) and self._replica.alive:
            pid = self._replica.record.pid
            assert pid is not None
            if self._kill_at == float("inf") and not self._replica.stopping:
                self._kill_at = time.monotonic() + self._grace + _KILL_EXTRA
            self._replica.terminate(processes.hosts([pid])[pid])

    def _on_exit(self, pid: int, code: int) -> None:
        replica = self._replica
        if pid != replica.record.pid:
            return  # an orphan that was taken in
        if code in (-signal.SIGTERM, 128 + signal.SIGTERM) and self._is_told():
            replica.stopping = True
        replica.exited(code)
        if replica.succeeded or replica.stopping or replica.final or not self._retries:
            return
        self._retries -= 1
        self._write()
        replica.prepare_restart()
        self._start()

    def _is_told(self) -> bool:
        """Whether this task was told to stop, or is about to be: Slurm's SIGTERM reaches all processes, one by one."""
        until = time.monotonic() + _TOLD_WITHIN
        while not self._told and (left := until - time.monotonic()) > 0:
            if select.select([self._wake], [], [], left)[0]:
                self._told = bool(_STOP_SIGNALS & set(os.read(self._wake, 4096)))
        return self._told

    def _end(self) -> int:
        left = processes.kill_descendants(self._job)
        if left:
            self._replica.logs.say(f"these processes could not be killed: {', '.join(map(str, left))}")
        self._replica.close_pipes()
        self._replica.logs.close()
        import shutil  # at the start there is no time to lose

        shutil.rmtree(self._run_dir, ignore_errors=True)
        self._write()
        assert self._replica.record.exit_code is not None
        return errors.shell_code(self._replica.record.exit_code)

    def _write(self) -> None:
        record = {**asdict(self._replica.record), "hostname": self._node, "job_restart": self._restart}
        try:
            store.write_json(self._record_path, record)
        except OSError as error:
            print(f"the record {record} could not be written: {error}", file=sys.stderr, flush=True)


def _run_dir() -> str:
    """For sockets, whose paths must be short."""
    base = os.environ.get("TMPDIR") or "/tmp"
    if not os.access(base, os.W_OK) or len(os.fsencode(base)) + len(folders.RUN_PREFIX) + 17 > folders.MAX_RUN_DIR:
        base = "/tmp"
    return folders.new_dir(os.path.join(base, folders.RUN_PREFIX))


def main(argv: list[str]) -> NoReturn:
    """Run the task that the command line names."""
    path, name, app_id, restart = argv
    paths = JobFolder(path)
    data = store.read_json(paths.request)
    if data is None:
        node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
        print(
            f"node {node} cannot read {paths.request}: all nodes must see that folder (run option job_dir)", flush=True
        )
        sys.exit(1)
    request = SlurmRequest.from_json(data)
    role = next(role for role in request.roles if role.name == name)
    replica = int(os.environ["SLURM_PROCID"])
    sys.exit(Task(paths, request, role, replica, app_id, int(restart)).run())
