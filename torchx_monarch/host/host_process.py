# SPDX-License-Identifier: BSD-3-Clause
"""The host process of one replica: it runs a workload, and the controller on replica 0, which the others follow."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NoReturn

from torchx_monarch.controller import host_events
from torchx_monarch.controller.host_messages import SignalReceived
from torchx_monarch.controller.host_network import HostNetwork, RendezvousError
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.controller.roles import coordinator
from torchx_monarch.host.command_process import HANDLED_SIGNALS
from torchx_monarch.host.host import Host
from torchx_monarch.host.no_restart_marker import NoRestartMarker
from torchx_monarch.host.workload import Workload
from torchx_monarch.insight import events
from torchx_monarch.insight.job_end import JobEnd
from torchx_monarch.insight.progress import Reporter, write_result
from torchx_monarch.model.env_names import CREDENTIALS, SAVE
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.host_result import HostResult, why_no_other_start
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.model.state import State
from torchx_monarch.model.world import CommandError, LaunchError
from torchx_monarch.system import error_files, processes, run_dirs, safe_files
from torchx_monarch.system.console import Console, ThreadedStderr, WriterThread

_HOST_EXIT_TIMEOUT = 5.0
"""Seconds that replica 0 waits for the other hosts to exit before it exits."""

_FOR_RANKS = (signal.SIGUSR1, signal.SIGUSR2)
"""The signals that are passed on."""


class HostProcess:
    """Run one replica, with the workload that ``choose`` returns, to its end."""

    def __init__(self, options: HostSpec, environ: Mapping[str, str], choose: Callable[[Host], Workload]) -> None:
        environ = dict(environ)
        os.environ.pop(CREDENTIALS, None)  # what this process starts may inherit its environment
        # What this process prints itself, such as a traceback, goes to a log file (`_redirect_own_output`).
        stdout = Console(os.dup(1))
        stderr = Console(os.dup(2), stdout)
        self._run_dir = environ.get("MONARCH_RUN_DIR") or run_dirs.new_run_dir()
        log_dir = os.path.abspath(environ.get("MONARCH_LOG_DIR") or tempfile.mkdtemp(prefix="torchx-monarch-"))
        events_path = environ.get("MONARCH_EVENTS") or os.path.join(log_dir, events.FILE)
        termination_log = environ.get("MONARCH_TERMINATION_LOG")
        reporter = Reporter(stderr, None if options.replica else events_path, options.role, termination_log)
        self._started = time.time()
        self._host = Host(options, environ, socket.gethostname(), stdout, stderr, log_dir, reporter)
        self._host.grace = options.grace
        limits = [self._started + options.stop_after] if options.stop_after else []
        if (limit := environ.get("SLURM_JOB_END_TIME", "")).isdecimal():
            limits.append(float(limit))
        self._host.ends_at = min(limits, default=0.0)
        self._workload = choose(self._host)
        self._error_file = environ.get("TORCHELASTIC_ERROR_FILE", "")
        self._no_restart_marker = NoRestartMarker(environ)
        self._tasks: set[asyncio.Task[None]] = set()

    def main(self) -> NoReturn:
        """Run the replica and exit with the exit code of the job's result."""
        self._redirect_own_output()
        if self._error_file:
            error_files.make_reserve(self._error_file)
        asyncio.run(self._main())
        raise AssertionError("a host process ends in os._exit")

    async def _main(self) -> NoReturn:
        host = self._host
        self._handle_signals()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
        self._no_restart_marker.begin()
        if not host.environ.get("MONARCH_EVENTS"):  # no process outside the hosts reports the start
            host.reporter.record("job_started", f"replica 0 runs on {host.hostname}")
        host.reporter.begin_result()
        try:
            result = await self._job()
        except Exception as error:
            traceback.print_exc()
            result = JobResult(
                1, f"internal error of the host process: {type(error).__name__}: {error}{processes.limit_hint(error)}"
            )
            host.reporter.line(f"{result.reason}; see {host.own_log}")
        await self._report_and_exit(result)
        raise AssertionError("unreachable")

    async def _report_and_exit(self, result: JobResult) -> None:
        host = self._host
        await self._workload.stop(signal.SIGTERM)
        why = why_no_other_start(result, host.options.retry_on)
        restarts = host.reporter.rank_restarts
        written = HostResult.from_job_result(result, rank_restarts=restarts, no_retry_reason=why)
        write_result(written, host.environ, host.reporter)
        if host.options.on_end and host.options.replica == 0:
            from torchx_monarch.insight.timeline import last_slow

            state = State.CANCELLED if result.stopped else State.FAILED if result.code else State.SUCCEEDED
            end = JobEnd(
                id=host.options.app,
                name=host.options.app,
                state=state,
                message=result.reason,
                exit_code=result.code,
                started=self._started,
                ended=time.time(),
                restarts=restarts,
                slow=last_slow(await asyncio.to_thread(host.reporter.read_events)),
            )
            if failure := end.run(host.options.on_end, host.environ):
                host.reporter.report("on_end", failure)
        self._exit(written)

    def _exit(self, result: HostResult) -> NoReturn:
        host = self._host
        if self._error_file:
            error_files.remove_reserve(self._error_file)
        is_marked = self._no_restart_marker.end(result)
        if is_marked is False:
            host.reporter.line("it may be started again: there is no folder here to note that it must not be")
        self._workload.close()
        marker = host.environ.get(processes.MARKER, "")
        processes.kill_until_gone(lambda: processes.own_descendants(marker))
        folder = host.sockets if "MONARCH_RUN_DIR" in host.environ else self._run_dir
        if folder:
            run_dirs.remove_tree(folder)
        WriterThread.finish()
        # Joining the threads of the executor can take seconds, and they have no work left.
        os._exit(0 if is_marked else result.code or 0)  # dockerd restarts after any other code

    async def _job(self) -> JobResult:
        host, options, workload = self._host, self._host.options, self._workload
        error, code = "", 1
        try:
            workload.parse()
            self._handle_signals(workload.command.options.signals_to_handle if workload.command else "")
        except CommandError as failure:
            error, code = str(failure), 2
        try:
            host.sockets = run_dirs.private_dir(self._run_dir)
            rendezvous, advertised = host.settle_addresses(self._run_dir, workload.command)
            if not error:
                try:  # before the rest: the imports of the zygote take longer than all steps below
                    await workload.start()
                except LaunchError as failure:
                    error = str(failure)
            credentials = host.environ.get(CREDENTIALS, "")
            host.network = HostNetwork.setup(rendezvous, advertised, options, credentials, host.sockets)
            if not error:
                await workload.connect()
        except ValueError as failure:
            return self._conclude(JobResult(1, f"host {options.replica}: {failure}"))
        given = host.environ.get("MONARCH_RESTART", "")
        registration = Registration(
            options.replica,
            host.hostname,
            os.getpid(),
            error,
            code,
            machine=host.environ.get("MONARCH_NODE", ""),
            restarts=int(given) if given.isdecimal() else self._no_restart_marker.restarts,
        )
        if options.replica == 0:
            return await self._control(registration)
        return await workload.follow(registration)

    # -- start ---------------------------------------------------------------------------------------------------------

    def _redirect_own_output(self) -> None:
        try:
            os.makedirs(self._host.log_dir, mode=0o700, exist_ok=True)
            log = safe_files.open_log(self._host.own_log)
        except OSError:
            log = os.open(os.devnull, os.O_WRONLY)  # creating the ranks' logs will report what is wrong with the folder
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        sys.stderr = ThreadedStderr(self._host.disk)

    def _handle_signals(self, more: str = "") -> None:
        """Have the stop signals, and ``--signals-to-handle``, stop the job; other SIGUSR1 and SIGUSR2 go to ranks."""
        loop = asyncio.get_running_loop()
        named = {signal.Signals[name.strip()] for name in more.split(",") if name}
        for number in {*HANDLED_SIGNALS, *named}:
            is_passed_on = number in _FOR_RANKS and number not in named
            loop.add_signal_handler(number, self._forward_signal if is_passed_on else self._signalled, number)

    # -- replica 0 -----------------------------------------------------------------------------------------------------

    async def _control(self, registration: Registration) -> JobResult:
        host, options, workload = self._host, self._host.options, self._workload
        rendezvous = Rendezvous(host.network, workload.sizes.min_hosts, host.reporter.line)
        self._spawn(host.reporter.show_life())
        controller = workload.controller(rendezvous)
        coordination = coordinator(rendezvous, host.environ, host.reporter)
        host.report = functools.partial(rendezvous.report, rendezvous.register(registration))
        try:
            await rendezvous.start()
        except RendezvousError as error:
            if options.replicas > 1 or workload.listens or options.peer_roles:
                return self._conclude(JobResult(1, str(error)))
            # The job needs nobody else; but no client can ask for its stacks.
            print(f"no client can connect to this host: {error}", file=sys.stderr, flush=True)  # this process's own log
        self._end_in_time(rendezvous)
        if not workload.has_begun:
            await coordination.begin(options.host_timeout)
        result = self._conclude(await controller.run())
        await rendezvous.await_cancel(result)
        if controller.ends_role:
            await coordination.end(result, _HOST_EXIT_TIMEOUT + (0.0 if result.stopped else host.grace))
            await rendezvous.announce(result, _HOST_EXIT_TIMEOUT + host.grace)
        return result

    def _conclude(self, result: JobResult) -> JobResult:
        reporter = self._host.reporter
        if result.cause and result.cause.traceback:
            who = "the command" if result.cause.is_command else f"rank {result.cause.rank}"
            reporter.block(f"traceback of {who}:", result.cause.traceback)
        if result.cause and result.cause.stderr_path:
            reporter.line(f"log of rank {result.cause.rank}: {result.cause.stderr_path}")
        word = "SUCCEEDED" if result.code == 0 else "STOPPED" if result.stopped else "FAILED"
        text = f"{word}: {result.reason}"
        if result.code and not reporter.shows_phases:
            reporter.line(text)
        reporter.phase("result", text, code=result.code, stopped=result.stopped, reason=result.reason)
        return result

    # -- events --------------------------------------------------------------------------------------------------------

    def _signalled(self, number: int) -> None:
        host, replica = self._host, self._host.options.replica
        host.reporter.line(f"host {replica}: received {signal.Signals(number).name}")
        pool = self._workload.pool
        may_save = number == signal.SIGTERM and pool is not None and pool.uses_steps
        if not may_save:
            self._spawn(self._workload.stop(number))
        self._spawn(self._report_signal(number, may_save))

    async def _report_signal(self, number: int, may_save: bool) -> None:
        host, replica = self._host, self._host.options.replica
        stop_file, announced, said = host.environ.get("MONARCH_STOP_FILE"), None, None
        if stop_file:
            # After a lease, the end of the ranks would be taken for a failure.
            with contextlib.suppress(asyncio.TimeoutError):
                said = await asyncio.wait_for(host.disk.run(_read_stop, stop_file), host.options.lease / 2)
                announced = said is not None
        saves = may_save and said in (None, SAVE)
        if may_save:
            self._spawn(self._workload.stop(number, saves=saves))
        if host.report is not None:
            await host.report(SignalReceived(number, announced, saves))
        else:
            # No controller to decide: this host has not joined yet, or has lost replica 0.
            registration = Registration(replica, host.hostname, os.getpid())
            event = host_events.signalled(registration, number, announced)
            host.reporter.report(event.kind, event.result.reason, replica=replica)
            await self._report_and_exit(self._conclude(event.result))

    def _end_in_time(self, rendezvous: Rendezvous) -> None:
        """Have the job end when its ``stop_after`` has passed since the start of this process."""
        if limit := self._host.options.stop_after:
            reason = f"{limit:g} s have passed (stop_after)"
            event = host_events.StopRequested(0, JobResult(128 + signal.SIGTERM, reason, stopped=True), saves=True)
            left = max(0.0, self._started + limit - time.time())
            asyncio.get_running_loop().call_later(left, rendezvous.events.post, event)

    def _forward_signal(self, number: int) -> None:
        text = f"host {self._host.options.replica}: passing {signal.Signals(number).name} on to its ranks"
        self._host.reporter.line(text)
        if self._workload.pool is not None:
            self._workload.pool.notify(number)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)  # asyncio keeps only weak references to tasks
        task.add_done_callback(self._tasks.discard)


def _read_stop(path: str) -> str | None:
    """Return what the file says with which a stop is announced; None if there is none."""
    with contextlib.suppress(FileNotFoundError), open(path) as file:
        return file.read(len(SAVE) + 1)
    return None
