# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The host process of one replica: it runs the ranks, a Monarch worker and, on replica 0, the controller."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Coroutine, Mapping
from typing import Any, NoReturn

from torchx_monarch.command.command import Command, CommandError, check, parse
from torchx_monarch.controller import host_events, retry
from torchx_monarch.controller.controller import Controller
from torchx_monarch.controller.elastic import NodeRange
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.job_options import JobOptions
from torchx_monarch.controller.rendezvous import Rendezvous, RendezvousError
from torchx_monarch.controller.rendezvous_client import RendezvousClient
from torchx_monarch.controller.roles import RoleCoordinator, Roles
from torchx_monarch.host.interpreters import Interpreters
from torchx_monarch.host.no_restart_marker import NoRestartMarker
from torchx_monarch.host.orphan_reaper import reap_orphans
from torchx_monarch.host.rank_environment import env_number
from torchx_monarch.host.rank_logs import RankLogs
from torchx_monarch.host.rank_pool import RankPool
from torchx_monarch.host.run_spec import RunSpec
from torchx_monarch.host.watchdog import ENABLED, FILE
from torchx_monarch.insight.progress import Reporter, write_failure_report
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.model.registration import Registration
from torchx_monarch.model.world import LaunchError, World
from torchx_monarch.system import error_files, open_files, processes, run_dirs, safe_files
from torchx_monarch.system.console import Console
from torchx_monarch.transport import local_addresses
from torchx_monarch.transport.agent_rpc import SOCKET_VARIABLE, AgentServer
from torchx_monarch.transport.connections import Address, ConnectError
from torchx_monarch.transport.local_addresses import NetworkOptions

_HOST_EXIT_TIMEOUT = 5.0
"""Seconds that replica 0 waits for the other hosts to exit before it exits."""

_ERROR_REPORT_TIMEOUT = 10.0
"""Seconds for which a host that cannot take part tries to report its error to replica 0."""

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class HostProcess:
    """Run one replica to its end.

    Args:
        options: parsed command line of the host process.
        environ: environment in which the backend started the host process.
    """

    def __init__(self, options: HostSpec, environ: Mapping[str, str]) -> None:
        self._options = options
        self._environ = dict(environ)
        os.environ.pop("MONARCH_CREDENTIALS", None)  # Monarch's processes inherit this environment
        self._hostname = socket.gethostname()
        # Monarch and its processes print to descriptors 1 and 2, which `_redirect_own_output` makes a log file.
        self._stdout = Console(os.dup(1))
        self._stderr = Console(os.dup(2), self._stdout)
        self._log_dir = self._environ.get("MONARCH_LOG_DIR") or tempfile.mkdtemp(prefix="torchx-monarch-")
        self._run_dir = self._environ.get("MONARCH_RUN_DIR") or run_dirs.new_run_dir()
        self._log_dir = os.path.abspath(self._log_dir)
        self._monarch_log = os.path.join(self._log_dir, "monarch.log")
        events_path = self._environ.get("MONARCH_EVENTS") if options.replica == 0 else None
        self._reporter = Reporter(self._stderr, events_path, options.role, self._environ.get("MONARCH_TERMINATION_LOG"))
        self._error_file = self._environ.get("TORCHELASTIC_ERROR_FILE", "")
        self._rendezvous: Rendezvous | None = None
        self._rendezvous_client: RendezvousClient | None = None
        self._roles: Roles | None = None
        self._role_coordinator = RoleCoordinator()
        self._command: Command | None = None
        self._pool: RankPool | None = None
        self._logs: RankLogs | None = None
        self._registration: Registration | None = None
        self._agent_gone = False
        # Seconds from SIGTERM to SIGKILL for ranks: torchrun's option or variable if given, else the host's --grace.
        self._grace = options.grace
        self._backend_restarts = 0
        self._first_output = asyncio.Event()
        self._sockets = ""
        self._no_restart_marker = NoRestartMarker(self._environ)
        self._tasks: set[asyncio.Task[None]] = set()

    def main(self) -> NoReturn:
        """Run the replica and exit with the exit code of the job's result."""
        processes.become_subreaper()
        self._redirect_own_output()
        if self._error_file:
            error_files.make_reserve(self._error_file)
        asyncio.run(self._main())
        raise AssertionError("a host process ends in os._exit")

    async def _main(self) -> NoReturn:
        self._handle_signals()
        self._spawn(reap_orphans())
        if told := self._no_restart_marker.begin():
            verdict, why = told
            self._reporter.line(f"host {self._options.replica}: not started again: {why}")
            await self._report_and_exit(verdict)
        try:
            verdict = await self._job()
        except Exception as error:
            traceback.print_exc()
            verdict = JobResult(
                1, f"internal error of the host process: {type(error).__name__}: {error}{open_files.hint(error)}"
            )
            self._reporter.line(f"{verdict.reason}; see {self._monarch_log}")
        await self._report_and_exit(verdict)
        raise AssertionError("unreachable")

    async def _report_and_exit(self, verdict: JobResult) -> None:
        if self._pool is not None:
            await self._pool.stop(signal.SIGTERM, self._grace)
        final = retry.why_no_other_start(verdict, self._options.retry_on)
        write_failure_report(verdict, self._environ, self._reporter, final)
        if self._error_file:
            error_files.remove_reserve(self._error_file)
        if not self._no_restart_marker.end(verdict, final):
            self._reporter.line("it may be started again: there is no folder here to note that it must not be")
        self._exit(verdict.code)

    def _exit(self, code: int) -> NoReturn:
        if self._pool is not None:
            self._pool.close()
        processes.kill_descendants(self._environ.get(processes.MARKER, ""))
        ours = self._sockets if "MONARCH_RUN_DIR" in self._environ else self._run_dir
        if ours:
            shutil.rmtree(ours, ignore_errors=True)
        # Joining Monarch's threads can take seconds, and they have no work left.
        os._exit(code)

    async def _job(self) -> JobResult:
        options, command = self._options, None
        address, nproc, error, code = "", 0, "", 1
        try:
            command = self._parse()
        except CommandError as failure:
            error, code = str(failure), 2
        try:
            self._sockets = run_dirs.private_dir(self._run_dir)
            rendezvous, advertised = self._settle_network(command)
            if command is not None:
                # Before the rest: the imports of the ranks take longer than all steps below.
                nproc = await self._start_interpreters(command)
                self._start_watchdog(command)
        except LaunchError as failure:
            error = str(failure)
        except ValueError as failure:
            return self._conclude(JobResult(1, f"host {options.replica}: {failure}"))
        try:
            credentials = self._environ.get("MONARCH_CREDENTIALS", "")
            host_network = HostNetwork.setup(
                rendezvous, advertised, NetworkOptions.of(options), credentials, self._sockets, options.replica == 0
            )
        except ValueError as failure:
            return self._conclude(JobResult(1, f"host {options.replica}: {failure}"))
        if not error:
            address = await self._start_worker(host_network)
        host = Registration(options.replica, address, self._hostname, os.getpid(), nproc, error, code)
        self._registration = host
        return await (
            self._control(host, host_network) if options.replica == 0 else self._follow_controller(host, host_network)
        )

    # -- start ---------------------------------------------------------------------------------------------------------

    def _redirect_own_output(self) -> None:
        try:
            os.makedirs(self._log_dir, mode=0o700, exist_ok=True)
            log = safe_files.open_file(self._monarch_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        except OSError:
            log = os.open(os.devnull, os.O_WRONLY)  # creating the ranks' logs will report what is wrong with the folder
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)

    def _handle_signals(self, more: str = "") -> None:
        """Install signal handlers: signals stop the job; SIGUSR1 and SIGUSR2, unless in ``more``, go to the ranks.

        Args:
            more: torchrun's ``--signals-to-handle``: names of further signals that stop the job, separated by commas.
        """
        loop = asyncio.get_running_loop()
        named = {signal.Signals[name.strip()] for name in more.split(",") if name}
        for number in {*_STOP_SIGNALS, *named}:
            loop.add_signal_handler(number, self._signalled, number)
        for number in {signal.SIGUSR1, signal.SIGUSR2} - named:
            loop.add_signal_handler(number, self._forward_signal, number)

    def _parse(self) -> Command:
        options = self._options
        command = parse(options.command, self._environ)
        if command is None:
            raise CommandError(f"not a torchrun or Python command: {shlex.join(options.command)}")
        check(command, replicas=options.replicas, role=options.role)
        self._handle_signals(command.options.signals_to_handle)
        self._command = command
        self._backend_restarts = int(env_number(self._environ, "MONARCH_RESTART", 0))
        self._grace = env_number(self._environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", options.grace)
        if command.options.shutdown_timeout is not None:
            self._grace = float(command.options.shutdown_timeout)
        program = command.program_of(0)
        if program.mode == "script" and not os.path.exists(program.target):
            # CommandError makes the exit code 2, as for `python nosuch.py`.
            raise CommandError(f"can't open file {os.path.abspath(program.target)!r}: No such file or directory")
        return command

    async def _start_interpreters(self, command: Command) -> int:
        log_dir: str | None = self._log_dir
        if command.options.log_dir == os.devnull:
            log_dir = None  # torchrun writes no logs either with --log-dir /dev/null
        elif command.options.log_dir:
            log_dir = os.path.abspath(os.path.join(command.options.log_dir, self._run_id()))
        run = RunSpec(command, self._environ, self._options.preload)
        self._logs = RankLogs(self._options.replica, self._hostname, log_dir, run, self._stdout, self._stderr)
        interpreters = Interpreters(run, self._reporter.line, self._first_output.set)
        self._pool = RankPool(self._logs, interpreters, self._reporter.line)
        nproc = command.options.nproc_per_node if command.kind == "torchrun" else "1"
        return await self._pool.start(nproc)

    def _settle_network(self, command: Command | None) -> tuple[Address, str]:
        """Determine where replica 0 listens and by which name or address the other hosts dial this one.

        Raises:
            ValueError: one of the two is not valid; the message names it and the reason.
        """
        is_first = self._options.replica == 0
        given = self._options.rendezvous or self._environ.get("MONARCH_RENDEZVOUS") or f"unix:{self._run_dir}/r.sock"
        source = "--rendezvous" if self._options.rendezvous else "MONARCH_RENDEZVOUS"
        self._roles = roles = Roles.of(self._options, given, self._environ)
        if roles.server is not None and roles.looks_up:
            # The route to the first role's replica 0 is also the route to the other hosts.
            given, is_first = given.replace("@", roles.server.host), False
        rendezvous = Address.parse(local_addresses.expand_address(given, self._environ, is_first), source)
        if not rendezvous.networked:
            return rendezvous, "127.0.0.1"
        if rendezvous.scheme == "insecure-tcp":
            self._warn("plain TCP: any process that reaches this host's ports can run code here")
        options = NetworkOptions.of(self._options)
        if command is not None and command.options.local_addr and not options.advertise:
            options = dataclasses.replace(options, advertise=command.options.local_addr)
        advertised = local_addresses.advertised(
            rendezvous, is_first, options, self._environ.get("MONARCH_HOST_ADDRESS", "")
        )
        if interface := local_addresses.gloo_interface(advertised):
            self._environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if roles.looks_up:
            rendezvous = dataclasses.replace(rendezvous, host=advertised)
        return rendezvous, advertised

    async def _start_worker(self, host_network: HostNetwork) -> str:
        """Start Monarch's worker and the socket through which its agent calls this host; return the worker's URL."""
        link = os.path.join(self._sockets, "link")
        await AgentServer(link, self._handle, self._agent_lost, self._options.lease).start()
        os.environ[SOCKET_VARIABLE] = link
        os.environ["PYTHONSAFEPATH"] = "1"  # the agent must not import a monarch.py of the user's
        os.environ["TMPDIR"] = self._sockets  # Monarch makes its sockets there; ranks do not get this value

        def log(text: str) -> None:
            print(text, file=sys.stderr, flush=True)

        return await host_network.start_monarch(log, self._warn, self._options.lease)

    def _warn(self, text: str) -> None:
        self._reporter.line(f"INSECURE: host {self._options.replica}: {text}")

    def _start_watchdog(self, command: Command) -> None:
        """Start the server of ``torch.distributed.elastic.timer`` if the role's environment enables it."""
        if command.kind != "torchrun" or self._environ.get(ENABLED) != "1" or self._pool is None:
            return
        path = self._environ.get(FILE) or os.path.join(self._sockets, "timers")
        self._pool.start_watchdog(path, self._run_id())

    # -- the job -------------------------------------------------------------------------------------------------------

    def _run_id(self) -> str:
        """Return TORCHELASTIC_RUN_ID: torchrun's ``--rdzv-id``, else the app's id (torchrun: a random id or none)."""
        given = self._command.options.rdzv_id if self._command else "none"
        return given if given != "none" else self._options.app

    def _sizes(self) -> NodeRange:
        return NodeRange.of(self._command, self._options.replicas, self._options.host_timeout)

    def _first_log_attempt(self, sizes: NodeRange) -> int:
        """Return the number of the first attempt's log folders, after all that earlier starts may have used.

        A start uses at most one number for each attempt that it may make. This bound is unknown in two cases: an
        elastic job may make any number of attempts, and a restarted container has no MONARCH_RESTART. Replica 0 then
        continues after the highest existing folder: it takes part in each attempt. (With replacements the remaining
        hosts know the number.)
        """
        max_restarts = self._command.options.max_restarts if self._command else 0
        at_most = self._backend_restarts * (1 + max_restarts + self._options.replacements)
        counted = "MONARCH_RESTART" in self._environ or self._options.replacements > 0
        if self._logs is None or (counted and not (sizes.elastic and self._backend_restarts)):
            return at_most
        return max(at_most, self._logs.last_attempt() + 1)

    async def _control(self, host: Registration, host_network: HostNetwork) -> JobResult:
        """Run replica 0: gather the hosts, run the controller, announce the result."""
        options = self._options
        sizes = self._sizes()
        self._rendezvous = rendezvous = Rendezvous(
            host_network.rendezvous,
            options.replicas,
            host_network.identity,
            host_network.bind,
            options.peer_timeout,
            options.lease,
            sizes.fewest,
        )
        self._role_coordinator = role_coordinator = self._coordinate_roles(rendezvous, host_network)
        try:
            if self._listens:
                await rendezvous.start()
        except RendezvousError as error:
            return self._conclude(JobResult(1, str(error)))
        rendezvous.register(host)
        job = JobOptions.of(
            options,
            self._command,
            sizes,
            host_network,
            run_id=self._run_id(),
            first_log_attempt=self._first_log_attempt(sizes),
            grace=self._grace,
            monarch_log=self._monarch_log,
        )
        await role_coordinator.begin(options.host_timeout)
        verdict = await self._controller(job, rendezvous, host_network).run()
        verdict = await role_coordinator.await_others(verdict, options.host_timeout)
        self._conclude(verdict)
        await role_coordinator.end(verdict, _HOST_EXIT_TIMEOUT + (0.0 if verdict.stopped else self._grace))
        await rendezvous.announce(verdict, _HOST_EXIT_TIMEOUT + self._grace)
        return verdict

    @property
    def _listens(self) -> bool:
        """Whether replica 0 opens its listener: other hosts or roles connect to it."""
        return self._options.replicas > 1 or (self._roles is not None and self._roles.server is not None)

    def _coordinate_roles(self, rendezvous: Rendezvous, host_network: HostNetwork) -> RoleCoordinator:
        assert self._roles is not None
        return self._roles.coordinator(rendezvous, host_network, self._reporter)

    def _controller(self, job: JobOptions, rendezvous: Rendezvous, host_network: HostNetwork) -> Controller:
        return Controller(job, rendezvous, self._reporter, self._first_output, host_network.unreachable, self._handle)

    def _conclude(self, verdict: JobResult) -> JobResult:
        if verdict.cause and verdict.cause.traceback:
            self._reporter.block(f"traceback of rank {verdict.cause.rank}:", verdict.cause.traceback)
        if verdict.cause and verdict.cause.stderr_path:
            self._reporter.line(f"log of rank {verdict.cause.rank}: {verdict.cause.stderr_path}")
        word = "SUCCEEDED" if verdict.code == 0 else "STOPPED" if verdict.stopped else "FAILED"
        self._reporter.phase("verdict", f"{word}: {verdict.reason}", code=verdict.code)
        return verdict

    async def _follow_controller(self, host: Registration, host_network: HostNetwork) -> JobResult:
        """Run any other replica: register with replica 0 and wait for the result."""
        options = self._options
        # A host with an error only reports it. If replica 0 has the same error, it has already exited.
        join_timeout = self._sizes().join_timeout
        timeout = min(join_timeout, _ERROR_REPORT_TIMEOUT) if host.error else join_timeout
        try:
            self._rendezvous_client = await self._join(host, host_network, timeout, "replica 0")
        except RendezvousError as error:
            reason = host.error or str(error)
            self._reporter.line(f"host {options.replica}: {reason}")
            return JobResult(host.code if host.error else 1, reason)
        while True:
            rendezvous_client = self._rendezvous_client
            verdict = await rendezvous_client.verdict()
            if verdict is not None:
                if rendezvous_client.dismissed and not verdict.stopped:
                    self._reporter.line(f"host {options.replica} was refused: {verdict.reason}")
                return verdict
            self._rendezvous_client = None
            reason = rendezvous_client.lost or f"host {options.replica} ({self._hostname}) lost replica 0"
            verdict = JobResult(1, reason, consequence=True, replica=0)
            if self._agent_gone:
                verdict = JobResult(1, f"host {options.replica} ({self._hostname}) lost its agent")
            self._reporter.line(verdict.reason)
            if self._agent_gone or not options.replacements or self._pool is None:
                return verdict
            await self._pool.stop(signal.SIGTERM, self._grace)
            try:
                again = dataclasses.replace(host, attempt=self._pool.attempt)
                self._rendezvous_client = await self._join(
                    again, host_network, options.rejoin_timeout, "another replica 0"
                )
            except RendezvousError as error:
                self._reporter.line(f"host {options.replica}: {error}")
                return verdict

    async def _join(self, host: Registration, host_network: HostNetwork, timeout: float, whom: str) -> RendezvousClient:
        failure = ""

        def failed(error: ConnectError) -> None:
            nonlocal failure
            failure = f" ({error})"

        async def joining() -> RendezvousClient:
            until, where = time.monotonic() + timeout, host_network.rendezvous
            if self._roles is not None and self._roles.looks_up:
                where = await self._roles.find(self._options.role, host_network, timeout, failed)
            left = max(1.0, until - time.monotonic())
            peer_timeout, lease = host_network.options.peer_timeout, self._options.lease
            return await RendezvousClient.join(where, host, left, host_network.identity, peer_timeout, failed, lease)

        return await self._reporter.while_waiting(joining(), lambda: whom + failure)

    # -- requests and events -------------------------------------------------------------------------------------------

    async def _handle(self, op: str, args: dict[str, Any]) -> Any:
        """Execute a request that the controller sends through the agent.

        The operations are ``store(bind, advertised, hosts)``, ``launch(world, spares)``, ``watch()`` and ``stop(signal,
        grace)``; ``RankPool`` executes them. The last two return the replica's id and the exits so far.
        """
        assert self._pool is not None
        if op == "store":
            return await self._pool.serve_store(args["bind"], args["advertised"], args["hosts"])
        if op == "launch":
            return await self._pool.launch(World.from_json(args["world"]), args["spares"])
        if op == "watch":
            await self._pool.watch()
        elif op == "stop":
            await self._pool.stop(args["signal"], args["grace"])
        else:
            raise ValueError(f"unknown request {op!r}")
        return {"replica": self._options.replica, "exits": [one.to_json() for one in self._pool.exits()]}

    def _agent_lost(self, silent: float) -> None:
        host = self._registration
        if host is None:
            return
        self._agent_gone = True
        self._stop_soon(signal.SIGKILL)
        if self._rendezvous_client is not None:
            self._spawn(self._rendezvous_client.tell("agent_lost", silent=silent))
        elif self._rendezvous is not None:
            self._rendezvous.events.post(host_events.agent_lost(host, silent))

    def _signalled(self, number: int) -> None:
        self._reporter.line(f"host {self._options.replica}: received {signal.Signals(number).name}")
        self._stop_soon(number)
        stop_file = self._environ.get("MONARCH_STOP_FILE")
        announced = os.path.exists(stop_file) if stop_file else None
        host = self._registration or Registration(self._options.replica, "", self._hostname, os.getpid(), 0)
        event = host_events.signalled(host, number, announced)
        if self._rendezvous_client is not None:
            self._spawn(self._rendezvous_client.tell("signal", number=number, announced=announced))
        elif self._rendezvous is not None:
            self._rendezvous.events.post(event)
        else:
            # No controller to decide: this host has not joined yet, or has lost replica 0.
            self._reporter.note(event.KIND, event.result.reason, replica=event.replica)
            self._spawn(self._report_and_exit(self._conclude(event.result)))

    def _forward_signal(self, number: int) -> None:
        self._reporter.line(f"host {self._options.replica}: passing {signal.Signals(number).name} on to its ranks")
        if self._pool is not None:
            self._pool.notify(number)

    def _stop_soon(self, number: int) -> None:
        if self._pool is not None:
            self._spawn(self._pool.stop(number, self._grace))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)  # asyncio keeps only weak references to tasks
        task.add_done_callback(self._tasks.discard)
