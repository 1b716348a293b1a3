# SPDX-License-Identifier: BSD-3-Clause
"""The runs of a live allocation, in sequence, and its idle timeout.

Clients send these greetings to replica 0, one per connection, in addition to those of ``rendezvous``:

=============  =====================================================================================================
``run``        submit a run; the answer is ``accepted``, with how many are ``before`` it, and then the run's records up
               to its ``result``
``follow``     the same for a run that was accepted before, from its first record on; refused if it has no such ``rank``
``runs``       list the known runs; the answer is ``runs``, oldest first
``end-run``    stop a run and keep the hosts; the answer is ``ending``
=============  =====================================================================================================

The answer to ``state`` has a further field ``live``, and ``stop`` releases the hosts. A run continues when its client
disconnects, unless its request says otherwise. Its records are ``run``, ``phase`` (a line of the log), ``event`` (for a
client that is a job), ``output`` (of one rank), ``value`` (a part of what a function returned in one rank),
``attempts``, ``exit`` (one per rank of the last attempt), and finally ``result``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torchx_monarch.command.allocation_spec import AllocationSpec
from torchx_monarch.controller.host_events import Changes, RunEndRequested, concerns_hosts
from torchx_monarch.controller.host_messages import (
    BeginRun,
    FinishRun,
    HostError,
    ReadOutput,
    StopRanks,
    encode_request,
)
from torchx_monarch.controller.host_network import OfRank, Peer, RendezvousError
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.insight.run_log import RunLog
from torchx_monarch.model.codec import decode
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.model.run_request import RunRequest
from torchx_monarch.system import safe_files
from torchx_monarch.system.console import WriterThread
from torchx_monarch.transport import messages

TIMED_OUT = 124
"""Exit code of a run that its timeout has ended, as of ``timeout(1)``."""

_MAX_RUNS = 1000
"""Number of runs that replica 0 remembers; each takes some kilobytes."""

_MAX_QUEUED = 1000
"""Number of runs that may wait."""

_MAX_NUMBER = (1 << 63) - 1
"""A number of a request that is longer than any."""

_FINISH_TIMEOUT = 30.0
"""Seconds for the hosts to send the last output of a run and to prepare for the next run."""

_VALUES_TIMEOUT = 600.0
"""Seconds that the values of a function have to reach replica 0: at most 16 MiB from each rank."""

_CLIENT_TIMEOUT = 120.0
"""Seconds that a client has to connect again, which is as long as it tries, before a run ends with it. On this machine
a connection breaks with the client alone."""

_CLOSE_TIMEOUT = 5.0
"""Seconds for clients to receive the last records when the hosts end."""


@dataclasses.dataclass(eq=False)
class Run:
    """One run. Its times are in seconds since the epoch, 0 before the hosts have started or ended it, as its ranks.

    Attributes:
        folder: that of its log, and of its ranks' logs unless it names another.
        token: identifies the run on the hosts, even after a restart of this replica 0.
        run_log: its log, which is opened when it begins; None before, and if it ends before.
        opened: set when its log is open, or the run has ended.
        timer: ends the run when its timeout has passed; None without one.
        clients: how many are connected that receive its records.
    """

    number: int
    request: RunRequest
    folder: str = ""
    token: str = dataclasses.field(default_factory=lambda: os.urandom(8).hex())
    run_log: RunLog | None = None
    opened: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    submitted: float = dataclasses.field(default_factory=time.time)
    started: float = 0.0
    ended: float = 0.0
    result: JobResult | None = None
    timer: asyncio.TimerHandle | None = None
    clients: int = 0
    ranks: int = 0

    @property
    def begin(self) -> BeginRun:
        """The request with which hosts begin the run."""
        return BeginRun(self.number, self.token, self.request)

    def open_log(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make the log, once; raise ``OSError`` if that fails."""
        if self.result is None and self.run_log is None:
            self.run_log = RunLog(os.path.join(self.folder, "journal.jsonl"), loop)

    def close_log(self) -> None:
        if self.run_log is not None:
            self.run_log.close()

    def append(self, record: dict[str, Any]) -> None:
        """Append a record to the log; an event only for a client that is a job: no other reads events."""
        if self.run_log is not None and (record["type"] != "event" or self.request.ends_with_client):
            self.run_log.append(record)

    @property
    def state(self) -> str:
        if self.result is None:
            return "running" if self.started else "queued"
        return "stopped" if self.result.stopped else "failed" if self.result.code else "succeeded"

    @property
    def last_record(self) -> dict[str, Any] | None:
        """The last record for its clients; None before the end."""
        if self.result is None:
            return None
        return {
            "type": "result",
            **self.to_json(),
            "reason": self.result.reason,
            "stopped": self.result.stopped,
            "cause": self.result.cause.rank if self.result.cause else None,
            "seconds": self.ended - (self.started or self.ended),
        }

    def describe(self) -> str:
        since = time.time() - (self.started or self.submitted)
        by = f" by {self.request.by}" if self.request.by else ""
        return f"run {self.number}{by} ({self.state} for {since:.0f} s: {self.request.shown})"

    def why_no_rank(self, rank: int | None) -> str:
        """Return why the run has no such rank; empty if it has, if ``rank`` is None, or if it has not started yet."""
        if rank is None or 0 <= rank < self.ranks:
            return ""
        if not self.ranks:
            return f"run {self.number} has started no ranks" if self.result else ""
        existing = f"ranks 0 to {self.ranks - 1}" if self.ranks > 1 else "rank 0 alone"
        return f"run {self.number} has no rank {rank}; it has {existing}"

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.number,
            "state": self.state,
            "command": self.request.shown,
            "cwd": self.request.cwd,
            "code": self.request.code,
            "by": self.request.by,
            "submitted": self.submitted,
            "started": self.started,
            "ended": self.ended,
            "exit_code": self.result.code if self.result else None,
            # All runs are one message (MAX_MESSAGE), and a rank can have each character take twelve bytes of JSON.
            "reason": self.result.reason[:500] if self.result else "",
        }


class RunQueue:
    """The runs of an allocation, on replica 0."""

    def __init__(
        self,
        hosts: JobHosts,
        allocation: AllocationSpec,
        log_dir: str,
        disk: WriterThread,
        is_warm: Callable[[], bool],
    ) -> None:
        self.hosts = hosts
        self._events = hosts.events
        self.idle_timeout = allocation.idle_timeout
        self.ends_with_mesh = allocation.ends_with_mesh
        self._reporter = hosts.reporter
        self._default_command = allocation.words
        self._log_dir = log_dir
        self._disk = disk
        self._is_warm = is_warm
        self._known: list[Run] = []  # by their numbers
        # An earlier start of this host may have left runs.
        self._number = max(safe_files.numbered(log_dir, "run_"), default=0)
        self._count = 0
        self._busy_at = time.monotonic()
        self._users = 0
        self._changes = Changes()
        self._result: JobResult | None = None
        self._feeding = set[asyncio.Task[Any]]()
        hosts.rendezvous.stopped = JobResult(0, "released by its client", stopped=True)
        hosts.rendezvous.more_state = self._state
        hosts.rendezvous.network.handlers.update(
            {"run": self._run, "follow": self._follow, "runs": self._runs, "end-run": self._end_run}
        )

    @property
    def current(self) -> Run | None:
        """The run that the hosts execute."""
        return next((run for run in self._known if run.state == "running"), None)

    @property
    def _queue(self) -> list[Run]:
        return [run for run in self._known if run.state == "queued"]

    # -- for the controller --------------------------------------------------------------------------------------------

    async def next_run(self) -> Run | JobResult:
        """Wait for a run, start it and return it; a result if the allocation ends for lack of runs."""
        while not (run := await self._open_next()):
            counts, busy_at = self.idle_timeout and not self._users, self._busy_at
            left = busy_at + self.idle_timeout - time.monotonic() if counts else None
            if left is not None and left <= 0:
                reason = f"no run and no client for {self.idle_timeout:g} s: the hosts end"
                return JobResult(0, reason, stopped=True)
            await self._changes.until(lambda since=busy_at: bool(self._queue) or self._busy_at != since, left)  # type: ignore[misc]
        run.started = time.time()
        if run.request.timeout is not None:
            reason = f"run {run.number} was ended by its timeout of {run.request.timeout:g} s"
            result = JobResult(TIMED_OUT, reason, stopped=True)
            run.timer = asyncio.get_running_loop().call_later(run.request.timeout, self.end_run, run, result)
        self._reporter.follower = run.append
        self._reporter.report("run", f"run {run.number}: {run.request.shown}", run=run.number)
        return run

    async def _open_next(self) -> Run | None:
        """Return the oldest run of the queue whose log can be opened, and open it; None if there is none.

        Meanwhile it may be ended, or this be cancelled.
        """
        loop = asyncio.get_running_loop()
        while queue := self._queue:
            run, failure = queue[0], ""
            try:
                await self._disk.run(run.open_log, loop)
            except OSError as error:
                failure = f"the run's log cannot be made: {error.strerror}: {error.filename}"
            if run.result is not None:
                run.close_log()
                continue
            if failure:
                self._end(run, JobResult(1, failure))
                continue
            run.append({"type": "run", **run.to_json()})
            run.opened.set()
            return run
        return None

    def begun(self, run: Run, ranks: int) -> None:
        """Read the output of a run from the hosts of its attempt, which have begun it."""
        run.ranks = ranks
        for replica, member in self.hosts.members.attempt.hosts.items():
            if member.following is None or member.following.done():
                member.following = asyncio.ensure_future(self._read_output(run, replica))

    async def _read_output(self, run: Run, replica: int) -> None:
        """Add the output of a run on one host to its log, no faster than that is written."""
        assert run.run_log is not None
        with contextlib.suppress(HostError):  # its loss is an event
            while records := await self.hosts.ask_host(ReadOutput(run.token), replica):
                run.run_log.append_lines(records.encode())
                await run.run_log.room()

    async def finish(self, run: Run, result: JobResult) -> None:
        """Collect the last output of a run, prepare the hosts for the next run, and report the result."""
        attempt = self.hosts.members.attempt
        word = "STOPPED" if result.stopped else "FAILED" if result.code else "SUCCEEDED"
        within = _FINISH_TIMEOUT + (_VALUES_TIMEOUT if run.request.function else 0.0)

        async def finish_hosts() -> None:
            await self.hosts.broadcast(FinishRun(run.token))
            await asyncio.gather(*(member.following for member in attempt.hosts.values() if member.following))

        try:
            # An event says that hosts have left, or that the allocation ends: the next wait handles it.
            await self._events.until_event(finish_hosts(), concerns_hosts, within)
        except (HostError, asyncio.TimeoutError) as error:
            # The loss of a host is reported by a host event.
            self._reporter.line(f"some output of run {run.number} may be missing: {error or 'it did not come in time'}")
        for member in self.hosts.members:
            if member.following is not None:
                member.following.cancel()
                member.following = None
        exits = [{"type": "exit", "exit": dataclasses.asdict(attempt.exits[rank])} for rank in sorted(attempt.exits)]
        self._reporter.report("run_end", f"run {run.number} {word}: {result.reason}", run=run.number, code=result.code)
        self._reporter.follower = None
        self._end(run, result, [{"type": "attempts", "count": attempt.number + 1}, *exits])

    async def close(self, result: JobResult) -> None:
        """End all runs because the hosts end, and wait until the clients have received the last records."""
        self._reporter.follower = None
        self._result = result
        reason = f"the hosts have ended: {result.reason}"
        for run in [run for run in self._known if run.result is None]:
            self._end(run, JobResult(result.code or 1, reason, stopped=result.stopped))
        if self._feeding:
            await asyncio.wait(self._feeding, timeout=_CLOSE_TIMEOUT)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Suspend the idle timeout while a client sends code or runs actors, and restart it then."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            self._busy_at = time.monotonic()
            self._changes.notify()

    def _end(self, run: Run, result: JobResult, records: Sequence[dict[str, Any]] = ()) -> None:
        self._count += run.state == "running"
        run.result, run.ended = result, time.time()
        run.request = dataclasses.replace(run.request, function="")  # megabytes, for each run that is remembered
        for record in (*records, run.last_record or {}):
            run.append(record)
        run.close_log()
        run.opened.set()
        if run.timer is not None:
            run.timer.cancel()  # which would keep the run for as long
        for forgotten in [run for run in self._known if run.result is not None][:-_MAX_RUNS]:
            self._known.remove(forgotten)
        self._busy_at = time.monotonic()

    # -- for clients ---------------------------------------------------------------------------------------------------

    def end_run(self, run: Run, result: JobResult, number: int = signal.SIGTERM) -> None:
        """End a run, unless it has ended: at once, or have the controller stop its ranks."""
        if run.state == "queued":
            self._end(run, result)
        elif run.result is None:
            self._events.post(RunEndRequested(0, result, number))

    def _state(self) -> messages.Message:
        current, queue = self.current, self._queue
        idle = 0.0 if current or queue or self._users else time.monotonic() - self._busy_at
        live = {
            "ready": self.hosts.members.are_together,
            "run": current.number if current else None,
            "queued": len(queue),
            "runs": self._count,
            "idle": idle,
            "idle_timeout": self.idle_timeout,
            "warm": self._is_warm(),
        }
        return {"ended": self._result is not None, "live": live}

    def submit(self, request: RunRequest) -> Run:
        """Accept a run and queue it; raise ``RendezvousError`` if it is refused."""
        if self._result is not None:
            raise RendezvousError(f"the hosts have ended: {self._result.reason}")
        if not (request.command or request.program or self._default_command):
            raise RendezvousError(
                "nothing to run: this allocation has no command of its own; give one, such as torchrun train.py"
            )
        queue = self._queue
        before = queue[-1] if queue else self.current
        if before is not None and not request.queue:
            spec = self.hosts.spec
            end = f"torchx monarch stop {spec.app} --role {spec.role} --run {before.number}"
            raise RendezvousError(
                f"{before.describe()} has these hosts; queue this one (--queue, queue=True), or end that: {end}"
            )
        if len(queue) >= _MAX_QUEUED:
            raise RendezvousError(f"{_MAX_QUEUED} runs wait for these hosts already, and no more may")
        number = self._number + 1
        folder = os.path.join(self._log_dir, f"run_{number}")
        run = Run(number, request.shown_as(self._default_command), folder)
        try:
            encode_request(_MAX_NUMBER, run.begin)
        except messages.ProtocolError as error:
            raise RendezvousError(f"the command, environment and function of the run are too large: {error}") from None
        self._number = number
        self._known.append(run)
        self._changes.notify()
        return run

    def find(self, number: object) -> Run:
        """Return the run with a number; for None the current run, or the last one. ``RendezvousError`` if unknown."""
        if number is None and self._known:
            return self.current or self._known[-1]
        for run in self._known:
            if run.number == number:
                return run
        which = f"run {number!r:.20}" if number is not None else "a run"
        raise RendezvousError(f"{which} is not known here; the last was {self._number or 'none'}")

    async def _serve_records(self, run: Run, peer: Peer, wait: bool = True) -> None:
        run.clients += 1
        before = sum(other.result is None and other.number < run.number for other in self._known)
        if await peer.send({"type": "accepted", "run": run.number, "before": before}):
            feeding = asyncio.ensure_future(self._feed(run, wait, peer))
            self._feeding.add(feeding)
            feeding.add_done_callback(self._feeding.discard)
            await peer.while_connected(feeding)
        run.clients -= 1
        if run.request.ends_with_client and run.result is None:
            is_local = peer.writer.get_extra_info("socket").family == socket.AF_UNIX
            asyncio.get_running_loop().call_later(0 if is_local else _CLIENT_TIMEOUT, self._end_deserted, run)

    def _end_deserted(self, run: Run) -> None:
        if not run.clients:
            reason = f"run {run.number} was stopped: the job that has requested it does not exist any more"
            self.end_run(run, JobResult(128 + signal.SIGTERM, reason, stopped=True))

    async def _feed(self, run: Run, wait: bool, peer: Peer) -> None:
        last = b""
        with contextlib.suppress(OSError, RuntimeError):
            if wait:
                await run.opened.wait()
            if run.run_log is not None:
                async for lines in run.run_log.follow(wait):
                    last = lines[-1]
                    peer.writer.write(b"".join(lines))
                    await peer.writer.drain()
            # There is no log if the run has not begun, and it lacks its last record if the disk was full.
            if run.last_record is not None and not last.startswith(b'{"type":"result"'):
                await peer.send(run.last_record)

    async def _run(self, peer: Peer) -> None:
        try:
            request = RunRequest.from_message(peer.greeting)
        except ValueError as error:
            raise RendezvousError(str(error)) from None
        await self._serve_records(self.submit(request), peer)

    async def _follow(self, peer: Peer) -> None:
        run, wait = self.find(peer.greeting.get("run")), peer.greeting.get("wait") is not False
        if why := run.why_no_rank(decode(OfRank, peer.greeting).rank):
            raise RendezvousError(why)
        await self._serve_records(run, peer, wait)

    async def _runs(self, peer: Peer) -> None:
        known = sorted(self._known, key=lambda run: run.result is None)  # those that have ended first
        await peer.send({"type": "runs", "runs": [run.to_json() for run in known]})

    async def _end_run(self, peer: Peer) -> None:
        run = self.find(peer.greeting.get("run"))
        kill = peer.greeting.get("kill") is True
        number = signal.SIGKILL if kill else signal.SIGTERM
        reason = f"run {run.number} was {'killed' if kill else 'stopped'} by its client"
        self.end_run(run, JobResult(128 + number, reason, stopped=True), number)
        if kill and run.state == "running":
            # Directly: the controller may be waiting out the grace period of an earlier stop request.
            with contextlib.suppress(Exception):
                await self.hosts.broadcast(StopRanks(signal.SIGKILL, 0.0))
        await peer.send({"type": "ending", "run": run.number, "state": run.state})
