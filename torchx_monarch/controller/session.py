# SPDX-License-Identifier: BSD-3-Clause
"""The runs that the hosts execute, one after the other.

A batch job is a session with one run, which ends with it (``Session``). A live allocation is a session that accepts
runs until it is released or idle (``run_queue.RunQueue``).
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager

from torchx_monarch.controller.attempts import Attempts
from torchx_monarch.controller.host_events import (
    HostEvent,
    Interrupted,
    RunEndRequested,
    StopRequested,
    concerns_hosts,
)
from torchx_monarch.controller.host_messages import HostRefused
from torchx_monarch.controller.hosts import JobHosts, JobOptions
from torchx_monarch.controller.rank_queries import SampleRecorder
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.job_result import JobResult


class Session:
    """Execute the runs of the hosts, one after the other.

    This class is for a batch job: one run, for which the hosts are prepared when they register, and with which the
    session ends.
    """

    ends_with_mesh = False
    """Whether a Monarch client that shuts the host mesh down ends the session."""

    def __init__(self, hosts: JobHosts, new_attempts: Callable[[], Attempts], recorder: SampleRecorder) -> None:
        self.hosts = hosts
        self._events = hosts.events
        self._new_attempts = new_attempts
        self._attempts = new_attempts()
        self._recorder = recorder

    # -- for the controller --------------------------------------------------------------------------------------------

    async def run(self, hosts: list[Registration]) -> JobResult:
        """Execute runs until the session ends, or continue the present one on other hosts.

        Raises:
            Interrupted: an event is pending; what runs on the hosts still runs.
        """
        # Hosts that outlived an earlier replica 0 have run attempts already.
        self._attempts.number = max(self._attempts.number, *(host.attempt + 1 for host in hosts))
        self.hosts.form(hosts)
        try:
            while True:
                if not self.running:
                    self._attempts = self._new_attempts()
                    if idle := await self._events.interrupt(self.next_run(), concerns_hosts):
                        return idle
                with self._recorder.recording():
                    result = await self._execute(hosts)
                ended = await self.finish(self._attempts, result)
                # A request to end this run that is still pending concerns no run any more.
                self._events.settle_all(lambda event: isinstance(event, RunEndRequested))
                if ended is not None:
                    return ended
        finally:
            self.hosts.formed.clear()

    async def _execute(self, hosts: list[Registration]) -> JobResult:
        """Execute the current run, or continue it on a new mesh, and return its result."""
        try:
            options, ready = await self.begin(hosts)
            return await self._attempts.run(ready, options)
        except HostRefused as refusal:
            result = await self.refused(refusal)
            await self._attempts.stop(signal.SIGKILL)
            return result
        except Interrupted as interruption:
            if not isinstance(interruption.event, RunEndRequested):
                raise
            await self._attempts.stop(interruption.event.signal)
            return interruption.event.result

    async def stop(self, event: HostEvent, left: bool) -> bool:
        """Stop the ranks because of an event, whose host may have left; return whether there were any."""
        if left:
            self.hosts.running.discard(event.replica)
        if not self.hosts.running:
            return False
        await self._attempts.stop(event.signal)
        self.hosts.running = set()
        return True

    def hosts_changed(self, joined: bool) -> None:
        """Count the attempt that has ended; ``joined`` says that a host has joined, and not left."""
        self._attempts.hosts_changed(joined)

    async def close(self, result: JobResult) -> None:
        """Send the clients of the session its result."""

    # -- where a live allocation is different --------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether there is a current run."""
        return True

    async def next_run(self) -> JobResult | None:
        """Wait for a run and make it the current one; return a result if the session ends for lack of runs."""
        raise AssertionError("a batch job ends with its run")

    async def begin(self, hosts: list[Registration]) -> tuple[JobOptions, list[Registration]]:
        """Prepare the hosts for the current run; a repetition, on a new mesh, changes nothing on a prepared host.

        Returns:
            The options of the run, and the hosts with the number of ranks that each executes.

        Raises:
            Interrupted: an event is pending.
            HostRefused: a host cannot execute the run.
        """
        return self.hosts.options, hosts

    async def refused(self, refusal: HostRefused) -> JobResult:
        """Return the result of a run that a host has refused.

        Raises:
            Interrupted: the refusal, or what a host itself reports meanwhile, ends the job.
        """
        reason = (refusal.reason.splitlines() or ["refused"])[0]
        if refusal.own:
            raise Interrupted(StopRequested(0, JobResult(1, f"host 0: {reason}")))
        failure = StopRequested(0, JobResult(1, reason))
        raise Interrupted(await self._events.report_within(self.hosts.options.report_timeout, failure))

    async def finish(self, attempts: Attempts, result: JobResult) -> JobResult | None:
        """Note the result of the current run; return that of the session if it ends with the run, else None."""
        return result

    # -- for Monarch clients -------------------------------------------------------------------------------------------

    def in_use(self) -> AbstractContextManager[None]:
        """Return a context within which the session does not end for lack of runs."""
        return contextlib.nullcontext()
