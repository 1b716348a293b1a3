# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The supervisor's event loop: start the replicas, watch them, retry, stop, and record the result.

One thread sleeps in a selector until a pipe has data, a child has ended, a signal asks for the end, or a deadline has
passed. Two things are polled: whether the app's folder still exists, and whether hosts are stopped.

The rules:

- ``backends.outcome`` decides how the app and its roles have ended; sidecars that still run then are stopped.
- A replica that fails is restarted while its role has retries left: alone (REPLICA), with its role (ROLE), or with
  the whole app (APPLICATION). The count is per replica, per role, per app.
- A role with min_replicas continues without a replica whose failure it tolerates; only REPLICA restarts it first.
  The replica stays FAILED, and the app may still succeed.
- Otherwise the app has FAILED: the failed replica's siblings get a few seconds to end by themselves, then everything is
  stopped.
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
from collections.abc import Callable, Collection
from dataclasses import dataclass

from torchx_monarch.backends import outcome
from torchx_monarch.backends.local import folder, state_files, status
from torchx_monarch.backends.local.graceful_stop import SETTLE, GracefulStop
from torchx_monarch.backends.local.replica import Replica
from torchx_monarch.backends.local.request import DetachedRequest
from torchx_monarch.backends.local.status import (
    CANCELLED,
    FAILED,
    PENDING,
    RUNNING,
    SUCCEEDED,
    AppRecord,
)
from torchx_monarch.backends.local.stopped_hosts import StoppedHosts
from torchx_monarch.insight import events
from torchx_monarch.model import job_result
from torchx_monarch.system import processes

#: Seconds between two checks whether the app's folder still exists, and whether a host is stopped.
_LOOK_EVERY = 3.0


@dataclass
class CancelRequest:
    """The content of cancel.json.

    Attributes:
        grace: seconds from SIGTERM to SIGKILL; None for the app's own run option.
    """

    grace: float | None = None


def _load_cancel_request(paths: state_files.AppPaths) -> CancelRequest | None:
    """Read the request to end the app; return None if none was written. A damaged file is a request, too."""
    try:
        return state_files.load(CancelRequest, paths.cancel, paths.trusted)
    except state_files.DamagedFileError:
        return CancelRequest() if os.path.lexists(paths.cancel) else None


class SupervisorLoop:
    """Run one app from its request to its final status."""

    def __init__(self, paths: state_files.AppPaths, request: DetachedRequest, record: AppRecord) -> None:
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
        self._verdict: tuple[str, str] | None = None
        self._app_retries = 0
        self._role_retries = [0] * len(self._roles)
        self._replica_retries: dict[Replica, int] = {}
        self._given_up: set[Replica] = set()
        self._stopped = StoppedHosts(request.lease, _LOOK_EVERY)
        self._surplus: set[Replica] = set()
        """Hosts whose role has succeeded, whatever their own exit code."""
        awaited = {role.name for role in outcome.awaited(request.roles)}
        self._awaited = [index for index, role in enumerate(request.roles) if role.name in awaited]
        self._dirty = False
        self._done = False

    def _make_role(self, index: int) -> list[Replica]:
        role = self._request.roles[index]
        records = self._record.roles[index].replicas
        replicas = []
        for record, request in zip(records, role.replicas, strict=True):
            log_dir = self._paths.replica_logs(role.name, record.id)
            env = {**os.environ, **request.env}
            # Python writes to a pipe in blocks; users who follow a log expect lines.
            env.setdefault("PYTHONUNBUFFERED", "1")
            env.update(
                {
                    "TORCHELASTIC_ERROR_FILE": request.env.get(
                        "TORCHELASTIC_ERROR_FILE", os.path.join(log_dir, "error.json")
                    ),
                    processes.MARKER: self._request.job,
                    "MONARCH_RENDEZVOUS": f"unix:{self._socket(index)}",
                    "MONARCH_RUN_DIR": self._request.run_dir,
                    "MONARCH_PEERS": self._peers(),
                    "MONARCH_EVENTS": self._paths.events,
                    "MONARCH_LOG_DIR": log_dir,
                    "TORCHX_RANK0_HOST": "localhost",
                }
            )
            replicas.append(Replica(index, role, request, record, log_dir, env, self._selector))
        return replicas

    def _peers(self) -> str:
        names = [role.name for role in self._request.roles]
        return ",".join(f"{name}=unix:{self._socket(index)}" for index, name in enumerate(names) if name.isidentifier())

    def _socket(self, role_index: int) -> str:
        return os.path.join(self._request.run_dir, f"{role_index}.sock")

    # --- event loop

    def run(self, on_ready: Callable[[], None], keeper_pipe: int) -> None:
        """Run the app to its end.

        Args:
            on_ready: called when all replicas have been started and the status says so. A submitter that waits for it
                never sees PENDING, for which TorchX's commands sleep a second.
            keeper_pipe: a descriptor that becomes readable when the keeper dies.
        """
        wake, signalled = os.pipe()
        for fd in (wake, signalled):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
        for signum in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(signum, lambda *_: None)
        for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
            signal.signal(signum, signal.SIG_IGN)
        self._selector.register(wake, selectors.EVENT_READ, None)
        self._selector.register(keeper_pipe, selectors.EVENT_READ, None)
        if os.path.exists(self._paths.cancel):
            self._end(CANCELLED, "cancelled before it started", grace=0)
        else:
            self._start(self._all)
            if self._verdict is None:
                self._record.state = RUNNING
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
        return max(0.0, min(flushes) - time.monotonic()) if flushes else None

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
        """End an app whose folder was removed: users can no longer see or cancel it."""
        if self._verdict is None:
            if self._is_removed():
                self._end(CANCELLED, f"its folder {self._paths.root} was removed")
            else:
                self.at(time.monotonic() + _LOOK_EVERY, self._look_for_folder)

    def _look_for_stopped(self) -> None:
        """Kill hosts that have been stopped for too long, and count that as their failure."""
        if self._verdict is None:
            ending = {replica for graceful_stop in self._graceful_stops for replica in graceful_stop.scope}
            living = {r.record.pid: r for r in self._all if r.alive and r.record.pid is not None and r not in ending}
            for pid, why in self._stopped.look(living).items():
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
                    role=replica.role.name,
                    replica=replica.record.id,
                    exit_code=replica.record.exit_code,
                )
                self._on_failure(replica)
                return
            assert replica.record.pid is not None
            self._by_pid[replica.record.pid] = replica
            self._event(
                "replica_started",
                f"replica {replica.name} started (pid {replica.record.pid})",
                seconds=time.monotonic() - began,
                role=replica.role.name,
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
            role=replica.role.name,
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
        self._end_if_succeeded()
        if self._verdict is None and replica.record.id == 0 and replica.role.policy.elastic:
            self.at(time.monotonic() + SETTLE, lambda: self._stop_late_hosts(replica))

    def _end_if_succeeded(self) -> None:
        """End the app when every role that it waits for has succeeded."""
        if self._verdict is None and all(self._has_succeeded(index) for index in self._awaited):
            self._end(SUCCEEDED, "")

    def _has_succeeded(self, role_index: int) -> bool:
        replicas = self._roles[role_index]
        succeeded = [r.record.id for r in replicas if r.succeeded or r in self._surplus]
        return self._request.roles[role_index].policy.succeeded(succeeded, self._failed_for_good(role_index))

    def _failed_for_good(self, role_index: int) -> set[int]:
        return {r.record.id for r in self._roles[role_index] if r in self._given_up}

    def _stop_late_hosts(self, first: Replica) -> None:
        """Stop hosts of an elastic role that were started too late to learn that its job is over.

        Args:
            first: replica 0 of the role, which has succeeded some seconds ago.
        """
        living = {r.record.pid: r for r in self._roles[first.role_index] if r.alive and r.record.pid is not None}
        if self._verdict is not None or not first.succeeded:
            return
        late = [living[pid] for pid, hosts in processes.hosts(living).items() if hosts]
        if late:
            self._surplus.update(late)
            self._stop_gracefully(late, self._end_if_succeeded)

    def _tolerate(self, replica: Replica) -> None:
        self._given_up.add(replica)
        role = replica.role
        left = sum(r.alive or r.succeeded for r in self._roles[replica.role_index])
        text = f"{replica.failure}; {left} of {len(role.replicas)} are left, and {role.min_replicas} are enough"
        self._event("replica_spared", text, role=role.name, replica=replica.record.id)
        self._end_if_succeeded()

    def _on_failure(self, replica: Replica) -> None:
        index, role = replica.role_index, replica.role
        siblings = self._roles[index]
        failed = self._failed_for_good(index) | {replica.record.id}
        spare = not replica.final and role.policy.tolerates(failed)
        if replica.is_host and any(sibling.succeeded for sibling in siblings):
            # Hosts exit with 0 once all ranks of their role have: this host was killed after that.
            self._surplus.add(replica)
            self._event(
                "replica_spared",
                f"{replica.failure}; its role had succeeded",
                role=role.name,
                replica=replica.record.id,
            )
            self._end_if_succeeded()
            return
        if replica.final:
            pass
        elif spare and (siblings[0].succeeded or role.retry_policy != "REPLICA"):
            self._tolerate(replica)
            return
        elif role.retry_policy == "REPLICA":
            if self._replica_retries.get(replica, 0) < role.max_retries:
                self._replica_retries[replica] = self._replica_retries.get(replica, 0) + 1
                self._restart([replica], f"replica {replica.name}")
                return
        elif role.retry_policy == "ROLE":
            if self._role_retries[index] < role.max_retries:
                self._role_retries[index] += 1
                self._stop_gracefully(siblings, lambda: self._restart(siblings, f"role {role.name}"), settling=siblings)
                return
        elif self._app_retries < role.max_retries:
            self._app_retries += 1
            self._stop_gracefully(self._all, lambda: self._restart(self._all, "the app"), settling=siblings)
            return
        if spare:
            self._tolerate(replica)
        else:
            self._end(FAILED, replica.failure, settling=siblings)

    def _restart(self, replicas: Collection[Replica], what: str) -> None:
        self._graceful_stops = [w for w in self._graceful_stops if not set(w.scope) & set(replicas)]
        self._record.restarts += 1
        self._event("restart", f"{what} is restarted (restart {self._record.restarts})")
        self._given_up.difference_update(replicas)
        self._surplus.difference_update(replicas)
        for replica in replicas:
            replica.prepare_restart()
            self._note_unfinished(replica)
        self._start(replicas)

    def _stop_gracefully(
        self,
        scope: Collection[Replica],
        then: Callable[[], None],
        *,
        grace: float | None = None,
        settling: Collection[Replica] = (),
    ) -> None:
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
        wish = _load_cancel_request(self._paths)
        grace = self._request.grace if wish is None or wish.grace is None else max(0.0, wish.grace)
        if self._verdict is not None:
            for graceful_stop in self._graceful_stops:
                graceful_stop.shorten(grace)
            return
        message = "cancelled" if wish is not None else "the supervisor received SIGTERM, as when a machine shuts down"
        self._event("cancel", f"{message}; the job has {grace:g} s to end")
        self._end(CANCELLED, message, grace=grace)

    def _end(
        self,
        state: str,
        message: str,
        *,
        grace: float | None = None,
        settling: Collection[Replica] = (),
    ) -> None:
        self._verdict = (state, message)
        self._stop_gracefully(self._all, self._finish, grace=grace, settling=settling)

    def _finish(self) -> None:
        """Write the final status. No replica is alive any more, but processes that it has started may be."""
        assert self._verdict is not None
        state, message = self._verdict
        failed = self._failed() if state == FAILED else []
        if failed:
            message = failed[0].failure
        notes = [message] if message else []
        if left := processes.kill_descendants(self._request.job):
            notes.append(f"these processes could not be killed: {', '.join(map(str, left))}")
        for replica in self._all:
            replica.close_pipes()
            replica.logs.close()
            if replica.record.state == PENDING:
                replica.record.state = CANCELLED
        if lost := sum(replica.logs.lost for replica in self._all):
            reason = next(replica.logs.reason for replica in self._all if replica.logs.lost)
            notes.append(f"{lost} bytes of output could not be written to the logs: {reason}")
        if state == FAILED and (full := self._note_on_disk()):
            notes.append(full)
        self._record.state, self._record.msg, self._record.ended = state, "; ".join(notes), time.time()
        self._record.error = next((error for r in failed if (error := r.read_error()) is not None), None)
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

    def _failed(self) -> list[Replica]:
        """Return the failed replicas by the time of their end, those that report the root cause directly first.

        On a full disk, replicas without an error file come last: there may have been no room for it.
        """
        no_room = bool(self._note_on_disk())
        failed = [replica for replica in self._all if replica.record.state == FAILED and replica not in self._given_up]
        return sorted(
            failed, key=lambda one: (*one.indirectness, no_room and one.read_error() is None, one.record.ended or 0.0)
        )

    def _note_on_disk(self) -> str:
        """Describe a full state directory, for which files that name the cause may be missing; empty if it has room."""
        with contextlib.suppress(OSError):
            found = os.statvfs(self._paths.root)
            if found.f_blocks and not found.f_bavail:
                return f"the disk of {self._paths.root} is full, so details may be missing"
            if found.f_files and not found.f_favail:
                return f"the file system of {self._paths.root} has no inodes left, so details may be missing"
        return ""
