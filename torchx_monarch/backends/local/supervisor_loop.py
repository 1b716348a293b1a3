# SPDX-License-Identifier: BSD-3-Clause
"""The supervisor's event loop: start the replicas, watch them, restart them, and record the result.

One thread sleeps in a selector until a pipe has data, a child has ended, a signal asks for the end, or a deadline has
passed. One thing is polled: the app's folder, for its removal and a request to cancel.

The rules:

- A replica that fails is started again alone, ``max_retries`` times, whatever the retry policy: hosts of a role, or of
  an app, end and begin again together by themselves (``controller``). It waits longer and longer (``model.backoff``).
- ``core.state`` decides how the app has ended. Then what still runs is stopped: the siblings of the replica whose end
  has decided it first have ``SETTLE`` seconds to end by themselves.
- Hosts exit with 0 once all ranks of their role have. A host that is killed, or starts, after that has nothing to do.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sched
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import IO, ClassVar, cast

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.snapshot import AppSnapshot, Outcome, RoleSnapshot
from torchx_monarch.backends.core.state import MAX_HOST_DELAY, SETTLE, count_restarts, reduce
from torchx_monarch.backends.local import folder, gpus
from torchx_monarch.backends.local.machine_queue import POLL, MachineQueue, Ticket
from torchx_monarch.backends.local.supervision import SupervisorRecord, SupervisorRequest, run_on_end
from torchx_monarch.insight import events
from torchx_monarch.model import backoff, job_result
from torchx_monarch.model.env_names import RANK0_HOST
from torchx_monarch.model.role_spec import RetryPolicy, WorkloadKind
from torchx_monarch.model.state import State
from torchx_monarch.supervisor.replica import Replica, living, stop
from torchx_monarch.system import processes

_MAX_WAIT = 3600.0
"""The most seconds of one wait for events; epoll counts milliseconds in 32 bits, and a grace period has no limit."""


class SupervisorLoop:
    """Run one app from its request to its final status.

    Attributes:
        folder_interval: seconds between two checks of the app's folder.
    """

    folder_interval: ClassVar = 3.0

    def __init__(
        self, paths: state_files.SupervisorPaths, request: SupervisorRequest, record: SupervisorRecord
    ) -> None:
        self._paths = paths
        self._request = request
        self._record = record
        self._selector = selectors.DefaultSelector()
        self._wake = processes.watch_signals((signal.SIGCHLD, signal.SIGTERM))
        for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
            signal.signal(signum, signal.SIG_IGN)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._timers = sched.scheduler(time.monotonic)
        self._roles = [self._make_role(index) for index in range(len(request.roles))]
        self._replicas = [replica for role in self._roles for replica in role]
        self._by_pid: dict[int, Replica] = {}
        self._outcome: Outcome | None = None
        self._is_stopping = False
        """Whether the whole app was asked to stop."""
        self._saves = False
        """Whether its ranks may first come to an agreed stop."""
        self._settling: list[Replica] = []
        """The replicas that have some time to end by themselves before that stop."""
        self._tolerated: set[Replica] = set()
        """Replicas that had failed before the app failed by another one."""
        self._find_leftovers = functools.partial(processes.own_descendants, request.job)
        self._leftovers = processes.end(self._find_leftovers, processes.DAEMONS_PATIENCE)
        self._queue: MachineQueue | None = None
        self._is_changed = False
        self._done = False

    def _make_role(self, index: int) -> list[Replica]:
        role = self._request.roles[index]
        records = self._record.roles[index].replicas
        replicas = []
        for record in records:
            log_dir = self._paths.replica_logs(role.name, record.id)
            command, own = role.filled(self._request.job_id or self._request.app_id, record.id)
            env = {
                **os.environ,
                "TORCHELASTIC_ERROR_FILE": os.path.join(log_dir, "error.json"),
                "MONARCH_EVENTS": self._paths.events,
                **own,
                "MONARCH_RUN_DIR": self._request.run_dir,
                "MONARCH_LOG_DIR": log_dir,
                processes.MARKER: self._request.job,
            }
            if not self._request.networked:
                env["MONARCH_RENDEZVOUS"] = f"unix:{self._socket(index)}"
                env["MONARCH_PEERS"] = self._peers()
                env[RANK0_HOST] = "localhost"
            replicas.append(Replica(index, role.spec, command, role.cwd, record, log_dir, env, self._selector))
        return replicas

    def _peers(self) -> str:
        specs = [role.spec for role in self._request.roles]
        meshes = [index for index, spec in enumerate(specs) if spec.workload is WorkloadKind.ALLOCATION]
        return ",".join(f"{specs[index].name}=unix:{self._socket(index)}" for index in meshes)

    def _socket(self, role_index: int) -> str:
        return os.path.join(self._request.run_dir, f"{role_index}.sock")

    # --- event loop

    def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Run the app to its end.

        ``on_ready`` is called when all replicas have been started and the status says so. A submitter that waits for it
        never sees PENDING, for which TorchX's commands sleep a second.
        """
        if self._paths.load_stop() is not None:
            self._end(Outcome(State.CANCELLED, "cancelled before it started"), grace=0)
        elif self._request.gpus or self._request.slots:
            ticket = Ticket(self._request.job_id or self._record.app_id, self._request.gpus, self._request.slots)
            self._queue = MachineQueue(ticket, self._request.queued or self._record.created)
            self._await_turn()
        else:
            self._start_all()
        self._write_status()
        on_ready()
        self._check_folder()
        while not self._done:
            for key, _ in self._selector.select(self._on_time()):
                if isinstance(key.data, Replica):
                    key.data.read(cast("IO[bytes]", key.fileobj))
                else:
                    self._on_signals(os.read(self._wake, 4096))

    def _start_all(self) -> None:
        self._start(self._replicas)
        if self._outcome is None:
            self._record.state = State.RUNNING

    def _await_turn(self) -> None:
        """Start the replicas when the queue of this machine lets them; say meanwhile what they wait for."""
        if self._queue is None or self._outcome is not None:
            return
        if reason := self._queue.take():
            if reason != self._record.msg:
                self._record.msg, self._is_changed = reason, True
            self.at(time.monotonic() + POLL, self._await_turn)
            return
        self._record.msg = ""
        if devices := self._queue.ticket.devices:
            users = [replica for replica in self._replicas if not replica.spec.sidecar]
            each = len(devices) // max(1, len(users))
            for k, replica in enumerate(users):
                share = ",".join(devices[k * each : (k + 1) * each])
                replica.env |= {gpus.CUDA_VISIBLE_DEVICES: share, **gpus.ORDER}
        self._start_all()

    def at(self, when: float, call: Callable[[], None]) -> None:
        self._timers.enterabs(when, 0, call)

    def _on_time(self) -> float:
        """Do what is due and write the status; return the seconds until something more is due."""
        delay = self._timers.run(blocking=False)
        wait = _MAX_WAIT if delay is None else min(_MAX_WAIT, delay)
        now = time.monotonic()
        for replica in self._replicas:
            wait = min(wait, replica.log.flush_old(now) - now)
        self._write_status()
        return 0.0 if self._done else max(0.0, wait)

    def _on_signals(self, numbers: bytes) -> None:
        # Children first: a replica that ended before the request has not ended because of it.
        if signal.SIGCHLD in numbers:
            processes.reap(self._on_exit)
        if signal.SIGTERM in numbers and not self._done:
            self._on_cancel()

    def _write_status(self) -> None:
        if self._is_changed and not self._done:
            # A full disk costs intermediate states only: the next or the final state is written again.
            with contextlib.suppress(OSError):
                state_files.write_json(self._paths.status, asdict(self._record))
            self._is_changed = False

    def _check_folder(self) -> None:
        """End an app whose folder was removed, or whose cancellation was requested by a process that cannot signal."""
        if self._paths.load_stop() is not None:
            self._on_cancel()
        elif self._outcome is None and self._is_removed():
            self._end(Outcome(State.CANCELLED, f"its folder {self._paths.root} was removed"))
        self.at(time.monotonic() + self.folder_interval, self._check_folder)

    def _is_removed(self) -> bool:
        try:
            os.stat(self._paths.request)  # written before the supervisor starts, and never again
        except OSError as error:  # another one: a network file system that does not answer
            return isinstance(error, FileNotFoundError)
        return False

    def _event(
        self, kind: str, message: str, replica: Replica | None = None, *, seconds: float | None = None, **fields: object
    ) -> None:
        whose = {} if replica is None else {"role": replica.spec.name, "replica": replica.record.id}
        events.append(self._paths.events, kind, message, seconds=seconds, **whose, **fields)

    # --- starts and ends of replicas

    def _start(self, replicas: Iterable[Replica]) -> None:
        self._is_changed = True
        for replica in replicas:
            if self._outcome is not None:
                return
            if replica.record.id == 0:
                # If the socket of an earlier start exists, the new replica cannot bind to the same path.
                with contextlib.suppress(OSError):
                    os.unlink(self._socket(replica.role_index))
            began = time.monotonic()
            if not replica.start():
                self._event("replica_exited", replica.failure, replica, exit_code=replica.record.exit_code)
                self._on_failure(replica)
                continue
            pid, took = replica.record.pid, time.monotonic() - began
            assert pid is not None
            self._record.started = self._record.started or replica.record.started
            self._by_pid[pid] = replica
            text = f"replica {replica.name} started (pid {pid})"
            self._event("replica_started", text, replica, seconds=took, pid=pid, restart=replica.record.restarts)

    def _on_exit(self, pid: int, code: int) -> None:
        replica = self._by_pid.pop(pid, None)
        if replica is None:
            return  # an orphan process that was adopted
        self._is_changed = True
        replica.exited(code)
        assert replica.record.started is not None and replica.record.ended is not None
        lived = replica.record.ended - replica.record.started
        text = f"replica {replica.name} (pid {pid}) {job_result.describe_code(code)}"
        self._event("replica_exited", text, replica, seconds=lived, exit_code=code, stopped=replica.stopping)
        if self._outcome is not None:
            self._on_ending()
        elif replica.record.state is State.FAILED:
            self._on_failure(replica)
        else:
            self._on_success(replica)

    def _on_success(self, replica: Replica) -> None:
        self._end_if_decided(replica)
        if self._outcome is None and replica.spec.runs_ranks and not replica.stopping:
            self.at(time.monotonic() + SETTLE, lambda: self._stop_late_hosts(replica))

    def _on_failure(self, replica: Replica) -> None:
        spec = replica.spec
        if replica.retries < spec.max_retries and not replica.final and not self._is_over(replica.role_index):
            self._restart(replica)
            return
        outcome = reduce(self._snapshot()).outcome
        if outcome is None or outcome.state is State.SUCCEEDED:
            left = sum(sibling.record.state is not State.FAILED for sibling in self._roles[replica.role_index])
            why = f"{left} of {spec.replicas} are left, and {spec.min_replicas} are enough"
            if spec.min_groups:
                why = f"its group is lost, and {spec.min_groups} groups are enough"
            text = f"{replica.failure}; {'its role had succeeded' if self._is_over(replica.role_index) else why}"
            self._event("replica_spared", text, replica)
            self._tolerated.add(replica)
        self._end_if_decided(replica)

    def _restart(self, replica: Replica) -> None:
        replica.prepare_restart()
        lived = max(0.0, (replica.record.ended or 0.0) - (replica.record.started or 0.0))
        delay = replica.backoff.delay(lived)
        if replica.spec.runs_ranks and replica.spec.retry_policy is RetryPolicy.REPLICA:
            delay = min(delay, MAX_HOST_DELAY)
        note = backoff.describe(delay, lived) if delay else ""
        self._record.restarts = count_restarts(self._snapshot())
        text = f"replica {replica.name} is restarted (restart {replica.record.restarts})"
        self._event("restart", text + (f"; {note}" if note else ""), role=replica.spec.name)
        replica.log.say(note)
        self._is_changed = True
        if delay:
            self.at(time.monotonic() + delay, lambda: self._start_waiting(replica))
        else:
            self._start([replica])

    def _start_waiting(self, replica: Replica) -> None:
        if self._outcome is None and not self._is_over(replica.role_index):
            self._start([replica])

    def _is_over(self, role_index: int) -> bool:
        """Whether a role of ranks has succeeded: a host that starts now would find nobody to join."""
        return any(replica.succeeded and replica.spec.runs_ranks for replica in self._roles[role_index])

    def _stop_late_hosts(self, first: Replica) -> None:
        """Stop hosts that were started too late to learn that the job of their role is over: ``first`` has succeeded.

        They are hosts of an elastic role, and hosts that replace others. Hosts exit with 0 once all ranks of their role
        have, so no host of the role has anything left to do.
        """
        if self._outcome is not None or not first.succeeded:
            return
        is_late = first.spec.is_elastic and first.record.id == 0
        siblings = [r for r in self._roles[first.role_index] if is_late or r.record.restarts]
        running = living(siblings)
        late = [running[pid] for pid, hosts in processes.hosts(running).items() if hosts]
        stop(late, self._request.grace, self.at)

    # --- end of the app

    def _snapshot(self, *, errors: bool = False) -> AppSnapshot:
        """Return the app's snapshot: a host that does not run once its role has succeeded counts as succeeded.

        With ``errors``, it has what the replicas say of their failures.
        """
        is_error_lost = errors and bool(folder.describe_full_disk(self._paths))
        roles = []
        for index, (role, replicas) in enumerate(zip(self._request.roles, self._roles, strict=True)):
            is_over = self._is_over(index)
            snapshots = []
            for replica in replicas:
                is_late = replica.record.state is State.CANCELLED or (is_over and not replica.alive)
                state = State.SUCCEEDED if is_late else replica.record.state
                # Whatever the app has failed by came after the failures that its role has tolerated.
                tolerated = replica in self._tolerated
                error = (replica.read_error() or "") if errors and state is State.FAILED and not tolerated else ""
                more = {"state": state, "failure": replica.failure, "error": error, "is_error_lost": is_error_lost}
                more["was_stopped"] = tolerated
                snapshots.append(replica.record.snapshot(role.name, **more))
            roles.append(RoleSnapshot(role.spec, snapshots))
        return AppSnapshot(self._request.app_id, self._request.name, roles, grace=self._request.grace)

    def _end_if_decided(self, ended: Replica) -> None:
        """End the app if the end of this replica decides it. Its siblings, and joint roles, may end by themselves."""
        if self._outcome is None and (outcome := reduce(self._snapshot()).outcome) is not None:
            together = ended.spec.ends_together
            settling = [
                replica
                for replica in self._replicas
                if replica.role_index == ended.role_index or (together and replica.spec.ends_together)
            ]
            self._end(outcome, settling=settling)

    def _end(self, outcome: Outcome, *, grace: float | None = None, settling: Iterable[Replica] = ()) -> None:
        self._outcome = outcome
        self._settling = list(settling)
        self.at(time.monotonic() + SETTLE, self._stop_all)
        self._on_ending(grace)

    def _on_ending(self, grace: float | None = None) -> None:
        """Go on with the end of the app, as far as its replicas have ended."""
        if not any(replica.alive for replica in self._settling):
            self._stop_all(grace)
        if not any(replica.alive for replica in self._replicas):
            self._finish()

    def _stop_all(self, grace: float | None = None) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            grace = self._request.grace if grace is None else grace
            stop(self._replicas, grace, self.at, saves=self._saves)

    def _on_cancel(self) -> None:
        asked = self._paths.load_stop()
        grace = self._request.grace if asked is None or asked.grace is None else max(0.0, asked.grace)
        if grace <= 0:
            self._leftovers = processes.end(self._find_leftovers, None)
        if self._outcome is not None:
            self._is_stopping = True
            stop(self._replicas, grace, self.at)
            return
        message = "the supervisor received SIGTERM, as when a machine shuts down"
        self._saves = asked is None or asked.state is State.PENDING  # nobody has cancelled it
        if asked is not None:
            message = asked.message or "cancelled"
        self._event("cancel", f"{message}; the job has {grace:g} s to end")
        self._end(Outcome(State.CANCELLED, message), grace=grace)

    def _finish(self) -> None:
        """Write the final status. No replica is alive any more, but processes that it has started may be."""
        assert self._outcome is not None
        for pause in self._leftovers:
            self.at(time.monotonic() + pause, self._finish)
            return
        state, message = self._outcome.state, self._outcome.message
        exit_code = 0 if state is State.SUCCEEDED else None
        if state is State.FAILED:
            # The first replica to fail may only have lost another one, whose failure was reported later.
            status_now = reduce(self._snapshot(errors=True))
            message = status_now.cause.failure if status_now.cause else message
            self._record.error = status_now.error or None
            if status_now.cause and status_now.cause.exit_code is not None:
                exit_code = job_result.shell_code(status_now.cause.exit_code)
        notes = [message] if message else []
        if left := self._find_leftovers():
            notes.append(f"these processes could not be killed: {', '.join(map(str, left))}")
        for replica in self._replicas:
            replica.close_pipes()
            replica.log.close()
            if replica.record.state is State.PENDING:
                replica.record.state = State.CANCELLED
        if lost := sum(replica.log.lost for replica in self._replicas):
            reason = next(replica.log.reason for replica in self._replicas if replica.log.lost)
            notes.append(f"{lost} bytes of output could not be written to the logs: {reason}")
        if state is State.FAILED and (full := folder.describe_full_disk(self._paths)):
            notes.append(full)
        self._record.state, self._record.msg, self._record.ended = state, "; ".join(notes), time.time()
        if self._queue is not None:
            self._queue.close()
        folder.remove_run_dir(self._paths, self._request.run_dir)
        self._event(
            "ended", f"{state}: {message}" if message else state, seconds=self._record.ended - self._record.created
        )
        if self._is_removed():
            folder.remove_app(self._paths)  # the job may have made it again
        else:
            try:
                self._record.save_last(self._paths)
            except OSError as e:
                print(f"the final status {asdict(self._record)} could not be written: {e}", file=sys.stderr)
            self._run_on_end(exit_code)
        self._done = True

    def _run_on_end(self, exit_code: int | None) -> None:
        """Run the user's command for the end of the job, if that has ended."""
        command = self._request.roles[0].spec.on_end
        if command and (app := self._ended_app()):
            run_on_end(command, app, exit_code, self._record, self._paths)

    def _ended_app(self) -> AppSnapshot | None:
        """Return the app, which has ended; None if another supervisor tells that: the one of replica 0."""
        record = self._record
        if self._request.roles[0].first:
            return None
        # Without one supervisor for all replicas, those that are left of a failed job are stopped on request.
        asked = self._paths.load_ending() if record.state is State.CANCELLED else None
        return replace(
            self._snapshot(),
            app_id=self._request.job_id or record.app_id,
            started=record.started or 0.0,
            restarts=record.restarts,
            events=events.read(self._paths.events, below=self._paths.trusted)[0],
            native=Outcome(asked.state if asked else record.state, record.msg, time=record.ended or 0.0),
        )
