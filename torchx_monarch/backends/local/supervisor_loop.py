# SPDX-License-Identifier: BSD-3-Clause
"""The supervisor's event loop: start the replicas, watch them, retry, stop, and record the result.

One thread sleeps in a selector until a pipe has data, a child has ended, a signal asks for the end, or a deadline has
passed. Two things are polled: the app's folder, for its removal and a request to cancel, and whether hosts are stopped.

The rules:

- ``core.state`` decides how the app and its roles have ended; sidecars that still run then are stopped.
- A replica that fails is restarted while its role has retries left (``core.retries``), with a delay if it fails again.
- A role with min_replicas continues without a replica whose failure it tolerates; only REPLICA restarts it first.
  The replica stays FAILED, and the app may still succeed.
- Otherwise the app has FAILED: the failed replica's siblings get ``SETTLE`` seconds to end by themselves, then
  everything is stopped.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.snapshot import AppSnapshot, Outcome, RoleSnapshot
from torchx_monarch.backends.core.state import SETTLE, RetryBudget, reduce, root_cause
from torchx_monarch.backends.local import cancel_request, folder, status
from torchx_monarch.backends.local.request import LocalRequest
from torchx_monarch.backends.local.status import AppRecord
from torchx_monarch.insight import events
from torchx_monarch.model import backoff, job_result
from torchx_monarch.model.role_spec import RetryPolicy, WorkloadKind
from torchx_monarch.model.state import State
from torchx_monarch.supervisor.graceful_stop import GracefulStop
from torchx_monarch.supervisor.replica import Replica
from torchx_monarch.supervisor.signal_pipe import watch_signals
from torchx_monarch.supervisor.stopped_hosts import StoppedHosts
from torchx_monarch.system import processes

#: Seconds between two checks whether the app's folder still exists, and whether a host is stopped.
_LOOK_EVERY = 3.0

_LONGEST_WAIT = 3600.0
"""The most seconds of one wait for events; epoll counts milliseconds in 32 bits, and a grace period has no limit."""


class SupervisorLoop:
    """Run one app from its request to its final status."""

    def __init__(self, paths: state_files.AppPaths, request: LocalRequest, record: AppRecord) -> None:
        self._paths = paths
        self._request = request
        self._record = record
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_ids = itertools.count()
        self._roles = [self._make_role(index) for index in range(len(request.roles))]
        self._all = [replica for role in self._roles for replica in role]
        self._by_pid: dict[int, Replica] = {}
        self._unfinished: set[Replica] = set()
        self._graceful_stops: list[GracefulStop] = []
        self._outcome: Outcome | None = None
        self._leftovers: Iterator[float] = processes.terminate(lambda: processes.own_descendants(request.job))
        self._retries = RetryBudget()
        self._waiting: dict[Replica, float] = {}
        """Replicas that wait for their restart, and when it is due (``time.monotonic``)."""
        self._given_up: set[Replica] = set()
        """Replicas that have failed for good and are tolerated."""
        self._stopped = StoppedHosts(request.lease, _LOOK_EVERY)
        self._surplus: set[Replica] = set()
        """Hosts whose role has succeeded, whatever their own exit code."""
        self._dirty = False
        self._done = False

    def _make_role(self, index: int) -> list[Replica]:
        role = self._request.roles[index]
        records = self._record.roles[index].replicas
        replicas = []
        for record, request in zip(records, role.replicas, strict=True):
            log_dir = self._paths.replica_logs(role.name, record.id)
            env = {
                **os.environ,
                "TORCHELASTIC_ERROR_FILE": os.path.join(log_dir, "error.json"),
                "MONARCH_EVENTS": self._paths.events,
                "MONARCH_LEARNED_DIR": os.path.join(self._paths.trusted, "learned"),
                **request.env,
                "MONARCH_RUN_DIR": self._request.run_dir,
                "MONARCH_LOG_DIR": log_dir,
                processes.MARKER: self._request.job,
            }
            if not self._request.networked:
                env["MONARCH_RENDEZVOUS"] = f"unix:{self._socket(index)}"
                env["MONARCH_PEERS"] = self._peers()
                env["TORCHX_RANK0_HOST"] = "localhost"
            replicas.append(Replica(index, role.spec, request, record, log_dir, env, self._selector))
        return replicas

    def _peers(self) -> str:
        specs = [role.spec for role in self._request.roles]
        meshes = [index for index, spec in enumerate(specs) if spec.workload is WorkloadKind.SESSION]
        return ",".join(f"{specs[index].name}=unix:{self._socket(index)}" for index in meshes)

    def _socket(self, role_index: int) -> str:
        return os.path.join(self._request.run_dir, f"{role_index}.sock")

    # --- event loop

    def run(self, on_ready: Callable[[], None], keeper_pipe: int) -> None:
        """Run the app to its end.

        Args:
            on_ready: called when all replicas have been started and the status says so. A submitter that waits for it
                never sees PENDING, for which TorchX's commands sleep a second.
        """
        wake = watch_signals((signal.SIGCHLD, signal.SIGTERM))
        for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
            signal.signal(signum, signal.SIG_IGN)
        self._selector.register(wake, selectors.EVENT_READ, None)
        self._selector.register(keeper_pipe, selectors.EVENT_READ, None)
        if cancel_request.load(self._paths) is not None:
            self._end(State.CANCELLED, "cancelled before it started", grace=0)
        else:
            self._start(self._all)
            if self._outcome is None:
                self._record.state = State.RUNNING
        self._write_status()
        on_ready()
        self._look_for_folder()
        self._look_for_stopped()
        while not self._done:
            self._write_status()
            for key, _ in self._selector.select(self._timeout()):
                if isinstance(key.data, Replica):
                    self._read(key.data, key.fd)
                elif key.fd == wake:
                    self._on_signals(os.read(wake, 4096))
                else:
                    self._selector.unregister(keeper_pipe)
                    self._event("keeper_lost", "the keeper was killed; the job goes on without it")
            self._on_time()

    def _timeout(self) -> float | None:
        flushes = [when for r in self._unfinished if (when := r.logs.next_flush()) is not None]
        if self._timers:
            flushes.append(self._timers[0][0])
        return min(max(0.0, min(flushes) - time.monotonic()), _LONGEST_WAIT) if flushes else None

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call the function when ``time.monotonic()`` reaches ``when``."""
        heapq.heappush(self._timers, (when, next(self._timer_ids), call))

    def _on_time(self) -> None:
        now = time.monotonic()
        for replica in list(self._unfinished):
            replica.logs.flush_old(now)
            self._note_unfinished(replica)
        while self._timers and self._timers[0][0] <= now and not self._done:
            heapq.heappop(self._timers)[2]()

    def _read(self, replica: Replica, fd: int) -> None:
        replica.read(fd)
        self._note_unfinished(replica)

    def _note_unfinished(self, replica: Replica) -> None:
        if replica.logs.next_flush() is None:
            self._unfinished.discard(replica)
        else:
            self._unfinished.add(replica)

    def _on_signals(self, numbers: bytes) -> None:
        # Children first: a replica that ended before the request has not ended because of it.
        if signal.SIGCHLD in numbers:
            processes.reap(self._on_exit)
        if signal.SIGTERM in numbers and not self._done:
            self._on_cancel()

    def _write_status(self) -> None:
        if self._dirty and not self._done:
            # A full disk costs intermediate states only: the next or the final state is written again.
            with contextlib.suppress(OSError):
                state_files.write_json(self._paths.status, self._record.to_json())
            self._dirty = False

    def _look_for_folder(self) -> None:
        """End an app whose folder was removed, or whose cancellation was requested by a process that cannot signal."""
        if os.path.lexists(self._paths.cancel):
            self._on_cancel()
        elif self._outcome is None and self._is_removed():
            self._end(State.CANCELLED, f"its folder {self._paths.root} was removed")
        self.at(time.monotonic() + _LOOK_EVERY, self._look_for_folder)

    def _look_for_stopped(self) -> None:
        """Kill hosts that have been stopped for too long, and count that as their failure."""
        if self._outcome is None:
            ending = {replica for graceful_stop in self._graceful_stops for replica in graceful_stop.scope}
            living = {r.record.pid: r for r in self._all if r.alive and r.record.pid is not None and r not in ending}
            for pid, why in self._stopped.check(living).items():
                living[pid].kill(why)
            self.at(time.monotonic() + _LOOK_EVERY, self._look_for_stopped)

    def _is_removed(self) -> bool:
        try:
            os.stat(self._paths.request)  # written before the supervisor starts, and never again
        except FileNotFoundError:
            return True
        except OSError:  # a network file system that does not answer
            return False
        return False

    def _event(self, kind: str, message: str, *, seconds: float | None = None, **fields: object) -> None:
        events.append(self._paths.events, kind, message, seconds=seconds, **fields)

    # --- starts and ends of replicas

    def _start(self, replicas: Collection[Replica]) -> None:
        self._dirty = True
        for replica in replicas:
            if replica.record.id == 0:
                # If the socket of an earlier start exists, the new replica cannot bind to the same path.
                with contextlib.suppress(OSError):
                    os.unlink(self._socket(replica.role_index))
            began = time.monotonic()
            if not replica.start():
                self._event(
                    "replica_exited",
                    replica.failure,
                    role=replica.spec.name,
                    replica=replica.record.id,
                    exit_code=replica.record.exit_code,
                )
                self._on_failure(replica)
                return
            assert replica.record.pid is not None
            self._record.started = self._record.started or replica.record.started
            self._by_pid[replica.record.pid] = replica
            self._event(
                "replica_started",
                f"replica {replica.name} started (pid {replica.record.pid})",
                seconds=time.monotonic() - began,
                role=replica.spec.name,
                replica=replica.record.id,
                pid=replica.record.pid,
                restart=replica.record.restarts,
            )

    def _on_exit(self, pid: int, code: int) -> None:
        replica = self._by_pid.pop(pid, None)
        if replica is None:
            return  # an orphan process that was adopted
        self._dirty = True
        replica.exited(code)
        self._note_unfinished(replica)
        assert replica.record.started is not None and replica.record.ended is not None
        self._event(
            "replica_exited",
            f"replica {replica.name} (pid {pid}) {job_result.describe_code(code)}",
            seconds=replica.record.ended - replica.record.started,
            role=replica.spec.name,
            replica=replica.record.id,
            exit_code=code,
            stopped=replica.stopping,
        )
        for graceful_stop in self._graceful_stops:
            if replica in graceful_stop.scope:
                graceful_stop.check()
                return
        if not replica.succeeded:
            self._on_failure(replica)
        else:
            self._on_success(replica)

    def _on_success(self, replica: Replica) -> None:
        if replica.spec.runs_hosts:
            # Hosts exit with 0 once their role has succeeded: one that waits for its restart would find nobody to join.
            late = set(self._roles[replica.role_index]) & set(self._waiting)
            self._surplus.update(late)
            self._forget_restarts(late)
        self._end_if_succeeded()
        if self._outcome is None and (replica.spec.runs_hosts or replica.spec.is_elastic):
            self.at(time.monotonic() + SETTLE, lambda: self._stop_late_hosts(replica))

    def _end_if_succeeded(self, *, spares_had_time: bool = False) -> None:
        """End the app when every role that it waits for has succeeded."""
        if self._outcome is None:
            outcome = reduce(self._snapshot()).outcome
            if outcome is None or outcome.state is not State.SUCCEEDED:
                return
            if any(replica.alive and replica.spec.spares for replica in self._all) and not spares_had_time:
                self.at(time.monotonic() + SETTLE, lambda: self._end_if_succeeded(spares_had_time=True))
            else:
                self._end(State.SUCCEEDED, "")

    def _snapshot(self) -> AppSnapshot:
        """Return the state of the app, in which a host that was killed after its role had succeeded has succeeded."""
        roles = []
        for request, replicas in zip(self._request.roles, self._roles, strict=True):
            states = [State.SUCCEEDED if replica in self._surplus else replica.record.state for replica in replicas]
            snapshots = [replica.snapshot(state) for replica, state in zip(replicas, states, strict=True)]
            roles.append(RoleSnapshot(request.spec, snapshots))
        return AppSnapshot(self._request.app_id, self._request.name, roles, grace=self._request.grace)

    def _stop_late_hosts(self, first: Replica) -> None:
        """Stop hosts that were started too late to learn that the job of their role is over.

        They are hosts of an elastic role, and hosts that replace others. Hosts exit with 0 once all ranks of their role
        have, so no host of the role has anything left to do.

        Args:
            first: a host of the role that has succeeded some seconds ago.
        """
        if self._outcome is not None or not first.succeeded:
            return
        is_late = first.spec.is_elastic and first.record.id == 0
        replaces = first.spec.retry_policy is RetryPolicy.REPLICA
        siblings = [r for r in self._roles[first.role_index] if is_late or (replaces and r.record.restarts)]
        living = {r.record.pid: r for r in siblings if r.alive and r.record.pid is not None}
        late = [living[pid] for pid, hosts in processes.hosts(living).items() if hosts]
        if late:
            self._surplus.update(late)
            self._stop_gracefully(late, self._end_if_succeeded)

    def _tolerate(self, replica: Replica) -> None:
        self._given_up.add(replica)
        spec = replica.spec
        left = sum(r.alive or r.succeeded or r in self._waiting for r in self._roles[replica.role_index])
        text = f"{replica.failure}; {left} of {spec.replicas} are left, and {spec.min_replicas} are enough"
        self._event("replica_spared", text, role=spec.name, replica=replica.record.id)
        self._end_if_succeeded()

    def _on_failure(self, replica: Replica) -> None:
        index, spec = replica.role_index, replica.spec
        siblings = self._roles[index]
        failed = {sibling.record.id for sibling in siblings if sibling in self._given_up} | {replica.record.id}
        spare = not replica.final and spec.tolerates(failed)
        if spec.runs_hosts and any(sibling.succeeded for sibling in siblings):
            # Hosts exit with 0 once all ranks of their role have: this host was killed after that.
            self._surplus.add(replica)
            text = f"{replica.failure}; its role had succeeded"
            self._event("replica_spared", text, role=spec.name, replica=replica.record.id)
            self._end_if_succeeded()
        elif spare and (siblings[0].succeeded or spec.retry_policy is not RetryPolicy.REPLICA):
            self._tolerate(replica)
        elif not replica.final and self._retries.take(spec, replica.record.id):
            lived = max(0.0, (replica.record.ended or 0.0) - (replica.record.started or 0.0))
            delay = self._retries.delay(spec, lived, replica.record.id)
            note = backoff.describe(delay, lived) if delay else ""
            if spec.retry_policy is RetryPolicy.REPLICA:
                self._restart([replica], f"replica {replica.name}", delay, note)
            else:
                is_role = spec.retry_policy is RetryPolicy.ROLE
                scope, what = (siblings, f"role {spec.name}") if is_role else (self._all, "the app")
                self._stop_gracefully(scope, lambda: self._restart(scope, what, delay, note), settling=siblings)
        elif spare:
            self._tolerate(replica)
        else:
            self._end(State.FAILED, replica.failure, settling=siblings)

    def _restart(self, replicas: Collection[Replica], what: str, delay: float, note: str) -> None:
        self._graceful_stops = [w for w in self._graceful_stops if not set(w.scope) & set(replicas)]
        self._record.restarts += 1
        names = {replica.spec.name for replica in replicas}
        role = names.pop() if len(names) == 1 else None
        text = f"{what} is restarted (restart {self._record.restarts})" + (f"; {note}" if note else "")
        self._event("restart", text, role=role)
        self._given_up.difference_update(replicas)
        self._surplus.difference_update(replicas)
        for replica in replicas:
            replica.prepare_restart()
            if note:
                replica.logs.say(note)
            self._note_unfinished(replica)
        self._dirty = True
        when = time.monotonic() + delay
        self._waiting.update(dict.fromkeys(replicas, when))
        if delay:
            self.at(when, lambda: self._start_due(when))
        else:
            self._start_due(when)

    def _start_due(self, when: float) -> None:
        due = [replica for replica, its in self._waiting.items() if its == when]
        self._forget_restarts(due)
        self._start(due)

    def _forget_restarts(self, replicas: Collection[Replica]) -> None:
        for replica in replicas:
            self._waiting.pop(replica, None)

    def _stop_gracefully(
        self,
        scope: Collection[Replica],
        then: Callable[[], None],
        *,
        grace: float | None = None,
        settling: Collection[Replica] = (),
    ) -> None:
        self._forget_restarts(scope)
        for other in self._graceful_stops:
            if set(other.scope) & set(scope):
                other.drop()
        self._graceful_stops = [w for w in self._graceful_stops if not set(w.scope) & set(scope)]
        grace = self._request.grace if grace is None else grace
        graceful_stop = GracefulStop(self, scope, then, grace=grace, settling=settling)
        self._graceful_stops.append(graceful_stop)
        graceful_stop.begin()

    # --- end of the app

    def _on_cancel(self) -> None:
        asked = cancel_request.load(self._paths)
        grace = self._request.grace if asked is None or asked.grace is None else max(0.0, asked.grace)
        if grace <= 0:
            self._leftovers = iter(())
        if self._outcome is not None:
            for graceful_stop in self._graceful_stops:
                graceful_stop.shorten(grace)
            return
        message = "cancelled" if asked is not None else "the supervisor received SIGTERM, as when a machine shuts down"
        self._event("cancel", f"{message}; the job has {grace:g} s to end")
        self._end(State.CANCELLED, message, grace=grace)

    def _end(
        self,
        state: State,
        message: str,
        *,
        grace: float | None = None,
        settling: Collection[Replica] = (),
    ) -> None:
        self._outcome = Outcome(state, message)
        self._stop_gracefully(self._all, self._finish, grace=grace, settling=settling)

    def _finish(self) -> None:
        """Write the final status. No replica is alive any more, but processes that it has started may be."""
        assert self._outcome is not None
        for pause in self._leftovers:
            self.at(time.monotonic() + pause, self._finish)
            return
        state, message, error = self._outcome.state, self._outcome.message, ""
        if state is State.FAILED:
            # The first replica to fail may only have lost another one, whose failure was reported later.
            no_room = bool(folder.describe_full_disk(self._paths))
            failed = [
                replica
                for replica in self._all
                if replica.record.state is State.FAILED and replica not in self._given_up
            ]
            snapshots = [replica.snapshot(State.FAILED, replica.read_error() or "", no_room) for replica in failed]
            cause, error = root_cause(snapshots)
            message = cause.failure if cause is not None else message
        notes = [message] if message else []
        if left := processes.kill_descendants(self._request.job):
            notes.append(f"these processes could not be killed: {', '.join(map(str, left))}")
        for replica in self._all:
            replica.close_pipes()
            replica.logs.close()
            if replica.record.state is State.PENDING:
                replica.record.state = State.CANCELLED
        if lost := sum(replica.logs.lost for replica in self._all):
            reason = next(replica.logs.reason for replica in self._all if replica.logs.lost)
            notes.append(f"{lost} bytes of output could not be written to the logs: {reason}")
        if state is State.FAILED and (full := folder.describe_full_disk(self._paths)):
            notes.append(full)
        self._record.state, self._record.msg, self._record.ended = state, "; ".join(notes), time.time()
        self._record.error = error or None
        folder.remove_run_dir(self._paths, self._request.run_dir)
        self._event(
            "ended", f"{state}: {message}" if message else state, seconds=self._record.ended - self._record.created
        )
        if self._is_removed():
            folder.remove_app(self._paths)  # the job may have made it again
        else:
            try:
                status.save_last(self._paths, self._record)
            except OSError as e:
                print(f"the final status {self._record.to_json()} could not be written: {e}", file=sys.stderr)
        self._done = True
