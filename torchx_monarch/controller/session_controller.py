# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The controller of a live allocation: it runs one command after another on one mesh."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from torchx_monarch.controller.controller import Controller, HostRefused
from torchx_monarch.controller.host_events import Interrupted, RunEndRequested, concerns_hosts
from torchx_monarch.controller.job_options import JobOptions
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.controller.run_queue import Run, RunQueue
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.model.registration import Registration
from torchx_monarch.model.world import LaunchError
from torchx_monarch.transport import agent_rpc, messages

T = TypeVar("T")

_FINISH_TIMEOUT = 30.0
"""Seconds for a host to send the last output of a run and to prepare for the next run."""

_OUTPUT_TIMEOUT = 5.0
"""Seconds for output that a host has sent to arrive."""


class HostsError(Exception):
    """A host could not execute a request that was sent to all hosts; the message names the host and the reason."""


class SessionController(Controller):
    """Execute the runs of an allocation on its hosts.

    Args:
        options: options of the allocation.
        rendezvous: the rendezvous of hosts and clients.
        reporter: writes progress lines and events.
        first_output: set when a rank of this host has printed something.
        unreachable: returns the reason for each host that cannot be reached, by replica.
        own_host: executes requests to replica 0's host, which is this process.
        run_queue: the runs.
    """

    def __init__(
        self,
        options: JobOptions,
        rendezvous: Rendezvous,
        reporter: Reporter,
        first_output: asyncio.Event,
        unreachable: Callable[[Iterable[Registration]], Awaitable[dict[int, str]]],
        own_host: agent_rpc.Handler,
        run_queue: RunQueue,
    ) -> None:
        super().__init__(options, rendezvous, reporter, first_output, unreachable, own_host)
        self._run_queue = run_queue
        self._held = options
        self._received: dict[int, int] = {}
        self._arrived = asyncio.Event()
        run_queue.broadcast = self.broadcast
        rendezvous.reports["output"] = self._output

    async def run(self) -> JobResult:
        """Execute runs until a client releases the hosts, the idle timeout expires, or the hosts fail."""
        verdict = await super().run()
        self._run_queue.ready = False
        self._reporter.echo = None
        await self._run_queue.close(verdict)
        return verdict

    async def broadcast(self, op: str, args: dict[str, Any]) -> dict[int, Any]:
        """Send a request to every host and return the answers by replica.

        Args:
            op: name of the operation (see ``SessionHost._handle``).
            args: its arguments, as JSON values.

        Raises:
            HostsError: there is no mesh, or a host answered with an error, whose text is the message.
        """
        if self._mesh is None or not self._run_queue.ready:
            raise HostsError("the hosts are not together")
        answers: asyncio.Queue[Any] = asyncio.Queue()
        hosts = list(self._hosts)
        self._stream_into(answers, "each", {"op": op, "args": args})
        found: dict[int, Any] = {}
        for _ in hosts:
            answer = await answers.get()
            if isinstance(answer, Exception):
                raise HostsError(str(answer).strip().splitlines()[-1] if str(answer) else type(answer).__name__)
            if "refused" in answer:
                raise HostsError(answer["refused"])
            found[answer["replica"]] = answer["result"]
        return found

    # -- runs ----------------------------------------------------------------------------------------------------------

    async def _work(self, hosts: list[Registration]) -> JobResult:
        run_queue = self._run_queue
        run_queue.ready = True
        run_queue.codes.clear()
        try:
            while True:
                run = run_queue.current
                if run is None:
                    if not await self._events.interrupt(run_queue.run_wanted(), concerns_hosts):
                        text = f"no run for {run_queue.idle_timeout:g} s: the hosts end"
                        return JobResult(0, text, stopped=True)
                    run = self._begin(run_queue.begin())
                await self._finish(run, await self._execute_run(run, hosts))
        finally:
            run_queue.ready = False

    def _begin(self, run: Run) -> Run:
        self._attempt_number, self._uncounted, self._launched = 0, 0, -1
        self._exits = {}
        self._received = {}
        self._reporter.echo = lambda text: run.run_log.append({"type": "phase", "text": text})
        self._reporter.note("run", f"run {run.number}: {run.request.shown}", run=run.number)
        return run

    async def _execute_run(self, run: Run, hosts: list[Registration]) -> JobResult:
        """Execute a run, or continue it on a new mesh, and return its result. A host event raises."""
        try:
            if run.request.synced:
                await self._distribute_code(run.request.code)
            args = {"run": run.number, "token": run.token, **run.request.to_json()}
            answers = {}
            async for answer in self._each_host("begin", args, hosts):
                answers[answer["replica"]] = answer
                if answer["fresh"]:
                    self._received[answer["replica"]] = 0
            run.ranks = sum(answer["nproc"] for answer in answers.values())
            first = answers[0]
            if self._launched < 0:
                self._restarts_left = first["max_restarts"]
            told = {name: first[name] for name in ("run_id", "max_restarts", "grace")}
            self._options = dataclasses.replace(self._held, **told)
            return await self._attempts(
                [dataclasses.replace(host, nproc=answers[host.replica]["nproc"]) for host in hosts]
            )
        except HostRefused as refusal:
            await self._stop_ranks(signal.SIGKILL)
            return JobResult(refusal.code, str(refusal))
        except Interrupted as interruption:
            if not isinstance(interruption.event, RunEndRequested):
                raise
            await self._stop_ranks(interruption.event.signal)
            return interruption.event.result

    async def _distribute_code(self, code: str) -> None:
        """Copy the code of a run to the hosts that joined after it was distributed."""
        if code in self._run_queue.codes:
            return
        assert self._run_queue.distribute_code is not None
        try:
            await self._events.interrupt(self._run_queue.distribute_code(code))
        except (HostsError, LaunchError) as error:
            raise HostRefused(str(error), 1) from None

    async def _finish(self, run: Run, verdict: JobResult) -> None:
        """Collect the last output of a run, prepare the hosts for the next run, and report the result."""
        word = "STOPPED" if verdict.stopped else "FAILED" if verdict.code else "SUCCEEDED"
        try:
            finish = self.broadcast("finish", {"token": run.token})
            sent = await self._events.interrupt(asyncio.wait_for(finish, _FINISH_TIMEOUT), concerns_hosts)
            await asyncio.wait_for(self._all_arrived(sent), _OUTPUT_TIMEOUT)
        except Interrupted:
            pass  # the hosts are not together any more, or the session ends: the next wait handles the event
        except (HostsError, asyncio.TimeoutError) as error:
            # The loss of a host is reported by a host event.
            self._reporter.line(f"some output of run {run.number} may be missing: {error or 'it did not come in time'}")
        self._reporter.echo = None
        exits = [{"type": "exit", "exit": self._exits[rank].to_json()} for rank in sorted(self._exits)]
        self._reporter.note("run_end", f"run {run.number} {word}: {verdict.reason}", run=run.number, code=verdict.code)
        self._run_queue.finish(run, verdict, [{"type": "attempts", "count": self._attempt_number + 1}, *exits])
        self._events.settle_all(lambda event: isinstance(event, RunEndRequested))

    async def _report_output(self) -> None:
        """Report nothing: the first output of a run is not an event."""

    # -- output of the other hosts -------------------------------------------------------------------------------------

    def _output(self, host: Registration, message: messages.Message) -> None:
        run, records = self._run_queue.current, message.get("records")
        if run is None or message.get("token") != run.token or not isinstance(records, str):
            return
        for line in records.splitlines():
            run.run_log.append_line(line.encode() + b"\n")
        self._received[host.replica] = self._received.get(host.replica, 0) + len(records.splitlines())
        self._arrived.set()

    async def _all_arrived(self, sent: dict[int, Any]) -> None:
        while any(self._received.get(replica, 0) < count for replica, count in sent.items() if replica):
            self._arrived.clear()
            await self._arrived.wait()
