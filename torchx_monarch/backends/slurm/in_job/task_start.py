# SPDX-License-Identifier: BSD-3-Clause
"""Start the replica's process, before the imports that the task needs to supervise it.

All nodes of a job start together, and the slowest one determines the start time of the job. Therefore this module
imports little, and no data classes.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Sequence

from torchx_monarch.backends.slurm import folder, macros
from torchx_monarch.backends.slurm.folder import JobFolder
from torchx_monarch.model.env_names import replica0_variable
from torchx_monarch.supervisor import spawn
from torchx_monarch.supervisor.signal_pipe import watch_signals
from torchx_monarch.system import processes, run_dirs

_HEAD_START = 0.1
"""Seconds in which the task leaves the processors to the replica's process."""

STOP_SIGNALS = {signal.SIGTERM, signal.SIGURG, signal.SIGINT, signal.SIGHUP}


class StartedTask:
    """A task and its replica's process, which runs unless this is a restart or the start failed.

    Attributes:
        paths: the job's folder.
        request: the content of request.json, not yet decoded.
        role: name of the role.
        replica: the replica's number in the role.
        app_id: the id of the job.
        restart: how often the job or the role was restarted before.
        node: name of this node.
        log_dir: folder of the replica's logs.
        run_dir: folder for sockets.
        job: value of ``processes.MARKER``, by which all processes of this task are found.
        command: program and arguments of the replica.
        environ: environment of the replica.
        cwd: working directory of the replica.
        wake: file descriptor from which the numbers of received signals are read.
        pid: process id of the replica; None if it has not been started.
        started: when ``start`` was called, in seconds since the epoch; 0.0 before.
        pipes: file descriptors of its stdout and stderr; empty if it has not been started.
    """

    def __init__(self, argv: list[str]) -> None:
        path, self.role, self.app_id, restart = argv
        self.restart = int(restart)
        self.node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
        self.paths = JobFolder(path)
        self.request = folder.read_request(self.paths, self.node)
        role = next(role for role in self.request["roles"] if role["spec"]["name"] == self.role)
        self.replica = int(os.environ["SLURM_PROCID"])
        self.cwd: str = role["cwd"]
        self.command, env = macros.substitute(role["command"], role["env"], role["image"], self.app_id, self.replica)
        self.log_dir = self.paths.replica_logs(self.role, self.replica)
        self.run_dir = run_dirs.new_run_dir()
        self.job = f"slurm:{self.app_id}:{os.path.basename(path)}"
        # The replica gets the nodes of the replicas 0 only, not the node lists.
        nodes = [os.environ.pop(macros.nodes_variable(index)) for index in range(len(self.request["roles"]))]
        first = {replica0_variable(index): macros.first_node(node_list) for index, node_list in enumerate(nodes)}
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
        self.environ.setdefault("TORCHELASTIC_ERROR_FILE", self.paths.error_file(self.role, self.replica))
        os.makedirs(self.log_dir, mode=0o700, exist_ok=True)
        # SIGUSR1 and SIGUSR2 are meant for the ranks; without a handler they would end this process.
        self.wake = watch_signals((signal.SIGCHLD, *STOP_SIGNALS, signal.SIGUSR1, signal.SIGUSR2))
        self.pid: int | None = None
        self.started = 0.0
        self.pipes: Sequence[int] = ()

    def start(self) -> None:
        """Start the process. On failure ``pid`` stays None, and ``Replica.start`` retries and reports the error."""
        self.started = time.time()
        variables = spawn.variables(self.run_dir, 0, self.replica, 0)
        with contextlib.suppress(OSError, ValueError):
            self.pid, self.pipes = spawn.spawn(self.command, {**self.environ, **variables}, self.cwd)


def begin(argv: list[str]) -> StartedTask:
    """Start the task that the arguments (FOLDER ROLE JOBID RESTART) name."""
    try:
        started_task = StartedTask(argv)
    except (AttributeError, LookupError, StopIteration, TypeError, ValueError):
        from torchx_monarch.backends.slurm.request import decode_or_exit  # imported late: it has data classes

        paths = JobFolder(argv[0])
        decode_or_exit(paths, folder.read_request(paths, os.uname().nodename))
        raise
    processes.become_subreaper()
    if not started_task.restart:  # on a restart, Task keeps the old error file and logs the restart first
        started_task.start()
    if started_task.pid is not None:
        # On few processors, let the replica run first: wait until it prints something or ends, or a signal arrives.
        select.select([started_task.wake, *started_task.pipes], [], [], _HEAD_START)
    return started_task
