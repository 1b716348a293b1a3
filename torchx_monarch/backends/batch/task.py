# SPDX-License-Identifier: BSD-3-Clause
"""Run one replica as a task of a batch job: ``entrypoint.py batch.task FOLDER ROLE NUMBER``. Standard library only.

The supervisor's loop runs the replica, writes its logs and record and restarts it. SIGTERM comes from the batch system
itself, which then starts the task again or not; the record says CANCELLED, and the queue says which.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from dataclasses import asdict, replace

from torchx_monarch.backends.batch.folder import BatchRequest, JobFolder, R, ReplicaFolder
from torchx_monarch.backends.batch.snapshot import QueuedJob, read_app
from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.snapshot import AppSnapshot
from torchx_monarch.backends.core.state import SETTLE, pending_stop, reduce
from torchx_monarch.backends.local.supervision import SupervisorRecord, SupervisorRequest
from torchx_monarch.backends.local.supervisor_loop import SupervisorLoop
from torchx_monarch.insight import events
from torchx_monarch.model.env_names import RANK0_HOST, replica0_variable
from torchx_monarch.model.job_result import shell_code
from torchx_monarch.model.state import State
from torchx_monarch.system import processes, run_dirs, safe_files

APP_ID = "MONARCH_APP_ID"
"""The variable with the app's id, for batch systems whose apps are named by their jobs; otherwise the folder's name."""

_POLL = 0.5
"""Seconds between two looks at the folder, which may be on a network file system."""


_QUIET_TIME = 10.0
"""Seconds in which the replicas of an app that start together are there."""


class _TaskLoop(SupervisorLoop):
    """The loop of one replica, which the app's folder may ask to stop."""

    folder_interval = 1.0

    def _on_signals(self, numbers: bytes) -> None:
        # Some batch systems signal all processes of a job at once: a replica that ended by that has not failed.
        if signal.SIGTERM in numbers and not self._done:
            self._on_cancel()
        super()._on_signals(numbers.replace(bytes([signal.SIGTERM]), b""))

    def _ended_app(self) -> AppSnapshot | None:
        """Return the app, if the records of all tasks decide its end, and no other task has told it."""
        assert isinstance(self._paths, ReplicaFolder)
        job = self._paths.job
        happened = events.read(job.events, below=job.trusted)[0]
        app = replace(_read_app(job, read_request_or_exit(BatchRequest, job), self._record.app_id), events=happened)
        outcome = reduce(app).outcome
        if outcome is None:
            return None
        try:
            os.close(safe_files.open_file(os.path.join(job.root, "on_end"), os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return None
        except OSError:  # a full disk: rather twice than never
            pass
        return replace(app, native=replace(outcome, time=time.time()))


def _read_app(job: JobFolder, stored: BatchRequest, app_id: str) -> AppSnapshot:
    """Return an app by the records of its tasks. Those that have recorded no end count as running."""
    specs = [role.spec for role in stored.roles]
    jobs = [[QueuedJob()] * spec.replicas for spec in specs]
    return read_app(app_id, stored.name, job, specs, jobs, job.load_ending(), grace=stored.grace)


def _end_rest(job: JobFolder, stored: BatchRequest, app_id: str, role: int, replica: int) -> None:
    """Have the tasks that are left stop, if the end of this one has decided how the app ends.

    Whatever decides it is the end of a task, which has recorded that before it reads what the others have. They have
    ``SETTLE`` seconds to end by themselves. Replica 0 of a role is the last of its hosts to end, and reads all records;
    the others read them only where it does not end, so that a thousand tasks do not read a thousand records each.
    """
    until, spec = time.monotonic() + SETTLE, stored.roles[role].spec
    while spec.runs_hosts and replica and time.monotonic() < until:
        first = job.replica(spec.name, 0).load_record()
        if first is None or first.terminal:  # None: the app was deleted
            return
        time.sleep(_POLL)
    while outcome := pending_stop(_read_app(job, stored, app_id)):
        if time.monotonic() >= until:
            with contextlib.suppress(OSError):  # a full disk
                job.write_stop(outcome, None)
                text = f"{outcome.message or outcome.state}; what still runs has {stored.grace:g} s to end"
                events.append(job.events, "stop", text)
            return
        time.sleep(_POLL)


def main(folder: str, role: str, number: str) -> int:
    """Run one replica to its end and return its exit code.

    Args:
        folder: the app's folder.
        role: index of its role.
        number: its id, or ``VARIABLE-FIRST``: the batch system's variable with the number of the task, and the first
            task's number.
    """
    variable, _, first = number.rpartition("-")
    replica = int(os.environ[variable]) - int(first) if variable else int(number)
    job, node = JobFolder(folder), os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    stored = read_request_or_exit(BatchRequest, job)
    spec = stored.roles[int(role)].spec
    paths = job.replica(spec.name, replica)
    os.makedirs(paths.root, mode=0o700, exist_ok=True)
    given_id = os.environ.pop(APP_ID, "")
    app_id = given_id or job.app_id
    on_end = "" if given_id else stored.roles[0].spec.on_end  # else the batch step runs it
    only = replace(stored.roles[int(role)], spec=replace(spec.alone(), on_end=on_end), first=replica)
    marker = f"{app_id}:{os.path.basename(stored.folder)}"
    run_dir = run_dirs.new_run_dir()
    request = SupervisorRequest(app_id, stored.name, [only], stored.grace, run_dir, marker, networked=True)
    record = _new_record(paths, request, node)
    with contextlib.suppress(OSError):  # a full disk
        safe_files.make_reserve(paths.reserve, record.reserve_bytes)
    state_files.write_json(paths.status, asdict(record))
    hosts = _await_replica0_hosts(job, stored, paths, record)
    if int(role) == replica == 0 and job.load_stop() is None:
        events.append(job.events, "job_started", f"the app runs; its first replica is on {node}")
    only.env = {**hosts, "MONARCH_NODE": node, "MONARCH_EVENTS": job.events.replace("$", "$$"), **only.env}
    processes.become_subreaper()
    processes.raise_file_limit()
    for signum in (signal.SIGUSR1, signal.SIGUSR2):  # for the ranks, if a batch system signals all processes of a job
        signal.signal(signum, lambda *_: None)
    _TaskLoop(paths, request, record).run()
    if record.state is State.CANCELLED and job.load_stop() is None:
        record.hostname = ""  # preempted: the next start may be elsewhere
        state_files.write_json(paths.status, asdict(record))
    elif not given_id:  # else a batch step owns the app
        _end_rest(job, stored, app_id, int(role), replica)
    code = record.roles[0].replicas[0].exit_code
    return 1 if code is None else shell_code(code)


def read_request_or_exit(kind: type[R], job: JobFolder) -> R:
    """Return the request of an app; end the process if this node cannot read it."""
    try:
        stored = state_files.load(kind, job.request, job.trusted)
    except state_files.DamagedFileError as error:
        sys.exit(f"node {os.uname().nodename}: {error}")
    if stored is None:
        sys.exit(f"node {os.uname().nodename} cannot read {job.request}: all nodes must see that folder")
    return stored


def _new_record(paths: ReplicaFolder, request: SupervisorRequest, node: str) -> SupervisorRecord:
    """Return the record of a start, which counts earlier ones: the batch system may start a job again."""
    before, counted = paths.load_record(), int(os.environ.pop("MONARCH_RESTART", "0"))
    restarts = before.restarts + 1 if before else counted
    record = SupervisorRecord.new(request, time.time(), node, restarts)
    record.started = before.started if before else None
    return record


def _await_replica0_hosts(
    job: JobFolder, stored: BatchRequest, paths: ReplicaFolder, record: SupervisorRecord
) -> dict[str, str]:
    """Wait until all replicas 0 have started, or the app is to stop; return the variables with their hosts.

    Their jobs may be in the queue for long, so the record says for which one this task waits. A batch system that knows
    the nodes beforehand has set the variables itself.
    """
    said_at = time.monotonic() + _QUIET_TIME
    names = {replica0_variable(index): role.spec.name for index, role in enumerate(stored.roles)}
    hosts = {variable: os.environ[variable] for variable in names if variable in os.environ}
    while job.load_stop() is None:
        for variable in names.keys() - hosts.keys():
            first = job.replica(names[variable], 0).load_record()
            if first is not None and first.hostname:
                hosts[variable] = first.hostname
        if len(hosts) == len(names):
            record.msg = ""
            return {RANK0_HOST: hosts[replica0_variable(0)], **hosts}
        if time.monotonic() > said_at:
            said_at = math.inf
            role = next(names[variable] for variable in names if variable not in hosts)
            record.msg = f"its job runs, and waits for replica 0 of role {role}"
            with contextlib.suppress(OSError):  # a full disk
                state_files.write_json(paths.status, asdict(record))
        time.sleep(0.25)  # the folder may be on a network file system
    return hosts
