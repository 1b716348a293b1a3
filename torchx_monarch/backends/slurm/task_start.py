# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How a task begins: it starts the replica's process before it imports what it needs to look after it.

All nodes of a job do so at a time, and the last one counts: this imports little, and no data classes.
"""

from __future__ import annotations

import os
import select
import signal
import time

from torchx_monarch.backends.local import spawn
from torchx_monarch.backends.slurm import array, folder, macros
from torchx_monarch.backends.slurm.folder import JobFolder
from torchx_monarch.model.env_names import replica0_variable
from torchx_monarch.system import processes, run_dirs

_HEAD_START = 0.1
"""Seconds that the replica's process has for itself."""

STOP_SIGNALS = {signal.SIGTERM, signal.SIGURG, signal.SIGINT, signal.SIGHUP}


class StartedTask:
    """A task whose process has been started, unless it is not the first or could not be.

    Attributes:
        paths: the job's folder, or the array task's.
        request: what is in it, as read.
        role: name of this task's.
        replica: which replica of it.
        app_id: the job's id, or the array task's.
        restart: how often the job has been started again before.
        node: name of this one.
        run_dir: for sockets.
        job: what marks every process of this task.
        command, environ, cwd: of the replica.
        wake: reads the numbers of the signals that come.
        pid: of the process; None when it is still to be started.
        started: when, in seconds since the epoch.
        pipes: from its stdout and stderr.
    """

    def __init__(self, argv: list[str]) -> None:
        path, self.role, self.app_id, restart = argv
        self.restart = int(restart)
        self.node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
        self.request = folder.read_request(JobFolder(path), self.node)
        self.paths = folder.of_this_run(JobFolder(path), self.request, os.environ)
        role = next(role for role in self.request["roles"] if role["name"] == self.role)
        self.replica = int(os.environ["SLURM_PROCID"])
        self.cwd: str = role["cwd"]
        self.command, env = macros.filled(role["command"], role["env"], role["image"], self.app_id, self.replica)
        self.log_dir = self.paths.replica_logs(self.role, self.replica)
        self.run_dir = run_dirs.new_run_dir()
        self.job = f"slurm:{self.app_id}:{os.path.basename(path)}"
        # Where the replicas 0 are; the lists are no program's business.
        nodes = [os.environ.pop(macros.nodes_variable(index)) for index in range(len(self.request["roles"]))]
        first = {replica0_variable(index): macros.first_node(each) for index, each in enumerate(nodes)}
        self.environ = {
            **os.environ,
            **first,
            macros.RANK0_HOST: first[replica0_variable(0)],
            **env,
            processes.MARKER: self.job,
            "MONARCH_LOG_DIR": self.log_dir,
            "MONARCH_RUN_DIR": self.run_dir,
            "MONARCH_EVENTS": self.paths.events,
        }
        if tasks := array.tasks(self.request["sbatch"].get("array")):
            self.environ[macros.PORT_OFFSET] = str(tasks.index(int(os.environ["SLURM_ARRAY_TASK_ID"])))
        self.environ.setdefault("TORCHELASTIC_ERROR_FILE", self.paths.error_file(self.role, self.replica))
        os.makedirs(self.log_dir, mode=0o700, exist_ok=True)
        self.wake = _watch_signals()
        self.pid: int | None = None
        self.started = 0.0
        self.pipes: list[int] = []

    def start(self) -> None:
        """Start the process; what cannot be started is left to ``Replica.start``, which says why."""
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(2)]
        self.started = time.time()
        variables = spawn.variables(self.run_dir, 0, self.replica, 0)
        try:
            self.pid = spawn.spawn(self.command, {**self.environ, **variables}, self.cwd, pipes[0][1], pipes[1][1])
            self.pipes = [pipes[0][0], pipes[1][0]]
        except (OSError, ValueError):
            for end, _ in pipes:
                os.close(end)
        finally:
            for _, end in pipes:
                os.close(end)


def begin(argv: list[str]) -> StartedTask:
    """Begin the task that the command line names."""
    try:
        started_task = StartedTask(argv)
    except (AttributeError, LookupError, StopIteration, TypeError, ValueError):
        from torchx_monarch.backends.slurm.request import decode_or_exit  # it has data classes

        paths = JobFolder(argv[0])
        decode_or_exit(paths, folder.read_request(paths, os.uname().nodename))
        raise
    processes.become_subreaper()
    if not started_task.restart:  # else there is an old error file to be put aside, and something to be said
        started_task.start()
    if started_task.pid is not None:
        # Where processors are scarce the replica has them first, until it says something or ends, or a signal comes.
        select.select([started_task.wake, *started_task.pipes], [], [], _HEAD_START)
    return started_task


def _watch_signals() -> int:
    wake, signalled = os.pipe()
    for end in (wake, signalled):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
    # Those that only reach the ranks are named because they would end this process otherwise.
    for number in (signal.SIGCHLD, *STOP_SIGNALS, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    return wake
