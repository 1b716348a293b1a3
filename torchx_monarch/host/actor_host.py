# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The host process of a role that waits for actors: a Monarch worker and, on replica 0, an optional script.

The user's actors run in processes that Monarch starts on this host. These processes have the environment, working
folder and output of the role, as ranks have. The lines that Monarch prints when such a process starts are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from typing import Any, NoReturn

from torchx_monarch.command.actors import Actors, parse_actors
from torchx_monarch.command.command import Command, CommandError, parse
from torchx_monarch.command.torchrun_options import DEFAULTS
from torchx_monarch.controller.actor_controller import ActorController
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.rendezvous import Rendezvous, RendezvousError
from torchx_monarch.controller.roles import is_registered_address
from torchx_monarch.host.host_process import _HOST_EXIT_TIMEOUT, HostProcess
from torchx_monarch.host.rank_environment import env_number
from torchx_monarch.host.rank_output import OutputPipe
from torchx_monarch.model.env_names import is_for_hosts
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.model.registration import Registration
from torchx_monarch.model.world import LaunchError, World
from torchx_monarch.monarch_adapter.monarch_api import LOG_TO_STDERR
from torchx_monarch.system import processes
from torchx_monarch.transport import connections, local_addresses, messages
from torchx_monarch.transport.connections import Address, ConnectError

_MONARCH_NOISE = re.compile(rb"(Monarch internal logs are being written to|unable to create log file in) .*")
"""Lines that Monarch prints whenever it starts a process; ``monarch_api`` keeps Monarch's log out of ``/tmp``."""


def _is_shown(line: bytes) -> bool:
    return _MONARCH_NOISE.fullmatch(line) is None


_PEER_TIMEOUT = 10.0
"""Seconds for another role's replica 0 to answer one request; requests are repeated until ``--host-timeout``."""


class ActorHost(HostProcess):
    """Run one replica of a role that waits for actors, to its end."""

    _actors = Actors(0.0, None)
    _pipes: tuple[int, int] = (-1, -1)
    _printed: tuple[OutputPipe, ...] = ()

    # -- start ---------------------------------------------------------------------------------------------------------

    def _redirect_own_output(self) -> None:
        super()._redirect_own_output()
        ends = []
        for number in (1, 2):  # the processes of the actors inherit these pipes
            read, write = os.pipe()
            os.dup2(write, number)
            os.close(write)
            ends.append(read)
        self._pipes = (ends[0], ends[1])

    async def _main(self) -> NoReturn:
        self._shut_down = asyncio.Event()
        self._printed = tuple(OutputPipe(os.fdopen(end, "rb", 0), lambda: None, _is_shown) for end in self._pipes)
        for output, console in zip(self._printed, (self._stdout, self._stderr), strict=True):
            output.assign(None, console, "")
        await super()._main()

    def _exit(self, code: int) -> NoReturn:
        processes.kill_descendants(self._environ.get(processes.MARKER, ""))
        for output in self._printed:
            output.drain()
        super()._exit(code)

    def _parse(self) -> Command:
        options = self._options
        command = parse(options.command, self._environ)
        if command is None or command.kind != "actors":
            raise CommandError(f"not a command of hosts for actors: {' '.join(options.command)}")
        self._actors = parse_actors(command, self._environ)
        self._grace = env_number(self._environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", options.grace)
        script = self._actors.script
        if script is not None and options.replica == 0:
            if script.program.mode == "script" and not os.path.exists(script.program.target):
                path = os.path.abspath(script.program.target)
                raise CommandError(f"can't open file {path!r}: No such file or directory")
            self._command = script
            return script
        return Command("actors", DEFAULTS, command.program)

    async def _start_interpreters(self, command: Command) -> int:
        if command.kind != "python":
            return 0
        # The script reads the hosts of all roles from this file, which `_run_script` writes when all hosts have joined.
        self._environ.update({"MONARCH_THIS_JOB": self._job_file, "MONARCH_BATCH_JOB": "1"})
        for name, value in LOG_TO_STDERR.items():  # the script may import Monarch before torchx_monarch
            self._environ.setdefault(name, value)
        return await super()._start_interpreters(command)

    @property
    def _job_file(self) -> str:
        return os.path.join(self._sockets, "job.json")

    async def _start_worker(self, host_network: HostNetwork) -> str:
        os.environ["TMPDIR"] = self._sockets  # Monarch makes its sockets there; `_exit` removes the folder
        for name in [name for name in os.environ if is_for_hosts(name)]:
            del os.environ[name]
        loop = asyncio.get_running_loop()

        def shut_down() -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(self._shut_down.set)

        return await host_network.start_monarch(self._reporter.line, self._warn, self._options.lease, shut_down)

    # -- the job -------------------------------------------------------------------------------------------------------

    async def _control(self, host: Registration, host_network: HostNetwork) -> JobResult:
        options = self._options
        self._rendezvous = rendezvous = Rendezvous(
            host_network.rendezvous,
            options.replicas,
            host_network.identity,
            host_network.bind,
            options.peer_timeout,
            options.lease,
        )
        credentials = self._environ.get("MONARCH_CREDENTIALS", "")
        actor_controller = ActorController(
            rendezvous,
            host_network,
            self._reporter,
            self._sizes(),
            self._actors.idle_timeout,
            credentials,
            self._shut_down,
            self._actors.script is not None,
        )
        self._role_coordinator = self._coordinate_roles(rendezvous, host_network)
        try:
            await rendezvous.start()
        except RendezvousError as error:
            return self._conclude(JobResult(1, str(error)))
        rendezvous.register(host)
        hosts = await actor_controller.gather()
        if isinstance(hosts, JobResult):
            verdict = hosts
        elif self._actors.script is None:
            verdict = await actor_controller.wait()
        else:
            verdict = await self._run_script(actor_controller, hosts, host_network)
        self._conclude(verdict)
        await rendezvous.announce(verdict, _HOST_EXIT_TIMEOUT + self._grace)
        return verdict

    async def _run_script(
        self, actor_controller: ActorController, hosts: list[Registration], host_network: HostNetwork
    ) -> JobResult:
        assert self._pool is not None
        try:
            meshes = {
                self._options.role: [host.address for host in hosts],
                **await self._hosts_of_other_roles(host_network),
            }
            if host_network.identity is None:
                url = host_network.client_url.partition(":")[0]
                where = f"ipc://{self._sockets}/script" if url == "ipc" else f"{url}://{host_network.advertised}:0"
            else:
                where = f"tls://{host_network.advertised}:0"
            tls = host_network.identity.files if host_network.identity else ()
            with open(self._job_file, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                json.dump({"meshes": meshes, "transport": where, "tls": tls}, file)
            address, port, served = await self._pool.serve_store(host_network.bind, host_network.advertised, 1)
            world = World(
                attempt=0,
                log_attempt=self._first_log_attempt(self._sizes()),
                restart_count=0,
                replicas=(0,),
                local_world_sizes=(1,),
                master_addr=address,
                master_port=port,
                agent_store=served,
                run_id=self._run_id(),
            )
            await self._pool.launch(world, spares=False)
        except (LaunchError, local_addresses.NetworkError, ConnectError, RendezvousError) as error:
            return JobResult(1, f"host 0: {error}")
        self._reporter.phase("ranks", "script started")
        return await actor_controller.run(self._pool, self._grace)

    async def _hosts_of_other_roles(self, host_network: HostNetwork) -> dict[str, list[str]]:
        """Wait for the hosts of the other roles and return their Monarch addresses by role, in the order of replicas.

        Raises:
            ConnectError: the hosts of a role have not all joined within ``--host-timeout``.
            RendezvousError: the registry does not know a role's replica 0 within ``--host-timeout``.
        """
        text = self._options.peers or self._environ.get("MONARCH_PEERS", "")
        peers = dict(peer.split("=", 1) for peer in text.split(",") if peer)
        peers.pop(self._options.role, None)

        async def ask(role: str, where: str) -> list[str]:
            until = asyncio.get_running_loop().time() + self._options.host_timeout
            if self._roles is not None and self._roles.server is not None and is_registered_address(where):
                address = await self._roles.find(role, host_network, self._options.host_timeout)
            else:
                address = Address.parse(
                    local_addresses.expand_address(where, self._environ, is_first=False), f"role {role}"
                )
            while True:
                try:
                    state = await self._query_rendezvous(address, host_network)
                    if not state["missing"]:
                        return [host["address"] for host in sorted(state["hosts"], key=lambda one: one["replica"])]
                    why = f"replica {', '.join(map(str, state['missing']))} of role {role} is missing"
                except ConnectError as error:
                    why = f"role {role}: {error}"
                if asyncio.get_running_loop().time() > until:
                    raise ConnectError(f"{why} after {self._options.host_timeout:g} s (--host-timeout)")
                await asyncio.sleep(0.1)

        waiting = asyncio.gather(*(ask(role, where) for role, where in peers.items()))
        found = await self._reporter.while_waiting(waiting, lambda: f"the hosts of {', '.join(peers)}")
        return dict(zip(peers, found, strict=True))

    async def _query_rendezvous(self, address: Address, host_network: HostNetwork) -> dict[str, Any]:
        reader, writer = await connections.connect(address, host_network.identity, self._options.peer_timeout)
        try:
            await messages.send(writer, {"type": "look", "version": messages.VERSION})
            state = await messages.receive(reader, _PEER_TIMEOUT)
        except (messages.ProtocolError, TimeoutError) as error:
            raise ConnectError(f"{address}: {error}") from None
        finally:
            writer.close()
        if state is None or state.get("type") != "state":
            raise ConnectError(f"{address}: {(state or {}).get('reason', 'it hung up')}")
        return state
