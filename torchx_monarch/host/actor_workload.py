# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The workload of hosts that wait for actors: a Monarch worker and, on replica 0, an optional script.

The user's actors run in processes that Monarch starts on this host. These processes have the environment, working
folder and output of the role, as ranks have. The lines that Monarch prints when such a process starts are dropped.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from torchx_monarch.command.actors import Actors, parse_actors
from torchx_monarch.command.command import Command, CommandError, parse
from torchx_monarch.command.torchrun_options import DEFAULTS
from torchx_monarch.controller.actor_work import ActorWork
from torchx_monarch.controller.controller import Work
from torchx_monarch.controller.elastic import NodeRange
from torchx_monarch.controller.host_messages import Answer, Request
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.rendezvous_client import no_requests
from torchx_monarch.controller.roles import is_registered_address
from torchx_monarch.host.batch_run import BatchRun, check_script
from torchx_monarch.host.ranks.rank_output import OutputPipe
from torchx_monarch.host.ranks.rank_pool import RankPool
from torchx_monarch.host.worker_loops import open_output
from torchx_monarch.host.workload import Control, Host
from torchx_monarch.model.env_names import BATCH_JOB, CREDENTIALS, THIS_JOB, is_for_hosts
from torchx_monarch.model.job_result import RankExit
from torchx_monarch.model.registration import Registration
from torchx_monarch.model.world import World
from torchx_monarch.monarch_adapter.worker_loop import SCHEMES, WorkerLoop
from torchx_monarch.system import processes
from torchx_monarch.transport import connections, local_addresses, messages
from torchx_monarch.transport.connections import Address, ConnectError

_PEER_TIMEOUT = 10.0
"""Seconds for another role's replica 0 to answer one request; requests are repeated until ``--host-timeout``."""


class ActorWorkload:
    """Wait for actors (see ``Workload``).

    Args:
        host: the host.
    """

    replaced = False
    listens = True

    def __init__(self, host: Host) -> None:
        self._host = host
        self._actors = Actors(0.0, None)
        self._output: list[OutputPipe] = []
        self._shut_down = asyncio.Event()
        self._run = BatchRun(host)

    @property
    def command(self) -> Command | None:
        """The command of the script, on replica 0; None without one."""
        return self._run.command

    @property
    def pool(self) -> RankPool | None:
        """The script, which is a rank of its own; None without one."""
        return self._run.pool

    def open(self) -> None:
        """Let the processes of the actors inherit pipes as stdout and stderr, and copy what arrives there."""
        for number, console in ((1, self._host.stdout), (2, self._host.stderr)):
            write, output = open_output(console, self._host.options.timestamps)
            os.dup2(write, number)
            os.close(write)
            self._output.append(output)

    def parse(self) -> Command:
        """Parse the role's command (see ``Workload``)."""
        options = self._host.options
        command = parse(options.command, self._host.environ)
        if command is None or command.kind != "actors":
            raise CommandError(f"not a command of hosts for actors: {' '.join(options.command)}")
        self._actors = parse_actors(command, self._host.environ)
        self._host.read_grace()
        script = self._actors.script
        if script is not None and options.replica == 0:
            check_script(script, os.getcwd())
            self._run.command = script
            return script
        return Command("actors", DEFAULTS, command.program)

    async def start(self) -> int:
        """Start the interpreter of the script, on replica 0 (see ``Workload``)."""
        if self._run.command is None:
            return 0
        # The script reads the hosts of all roles from this file, which is written when all hosts have joined.
        path = os.path.join(self._host.sockets, "job.json")
        self._host.environ.update({THIS_JOB: path, BATCH_JOB: "1"})
        return await self._run.start()

    async def start_worker(self, network: HostNetwork, warn: Callable[[str], None]) -> str:
        """Start Monarch's worker loop (see ``Workload``)."""
        os.environ["TMPDIR"] = self._host.sockets  # Monarch makes its sockets there; the folder is removed at the end
        for name in [name for name in os.environ if is_for_hosts(name)]:
            del os.environ[name]
        loop = WorkerLoop.reserve(network.rendezvous.scheme, network.advertised, network.options, self._host.sockets)
        tls = network.identity.files if network.identity else None
        await loop.start(tls, self._host.reporter.line, warn, self._host.options.lease, self._shut_down.set)
        return loop.address

    async def handle(self, request: Request) -> Answer:
        """Refuse a request: the leader of actors sends none (see ``Workload``)."""
        return await no_requests(request)

    def first_log_attempt(self, sizes: NodeRange) -> int:
        """Return the number of the log folder of the script (see ``Workload``)."""
        return self._run.first_log_attempt(sizes)

    def work(self, control: Control) -> Work:
        """Return the work of admitting clients, or of running the script (see ``Workload``)."""
        return ActorWork(
            control.rendezvous,
            control.network,
            self._host.reporter,
            self._actors.idle_timeout,
            self._host.environ.get(CREDENTIALS, ""),
            self._shut_down,
            ClientScript(self._host, self._run, control) if self._actors.script is not None else None,
        )

    def close(self) -> None:
        """End the processes of the actors, and pass on what they have printed."""
        processes.kill_descendants(self._host.environ.get(processes.MARKER, ""))
        for output in self._output:
            output.close()


class ClientScript:
    """The client script, the only rank of a world of its own (see ``controller.actor_work.Script``).

    Args:
        host: the host.
        run: the run whose only rank is the script.
        control: the parts of the controller.
    """

    def __init__(self, host: Host, run: BatchRun, control: Control) -> None:
        self._host = host
        self._run = run
        self._control = control

    async def start(self, hosts: Sequence[Registration]) -> None:
        """Write the hosts of all roles into a file and start the script (see ``Script``)."""
        network, options, pool = self._control.network, self._control.options, self._run.pool
        assert pool is not None
        meshes = {self._host.options.role: [host.address for host in hosts], **await self._hosts_of_other_roles()}
        if network.rendezvous.networked:
            where = f"{SCHEMES[network.rendezvous.scheme]}://{network.advertised}:0"
        else:
            where = f"ipc://{self._host.sockets}/script"
        tls = network.identity.files if network.identity else ()
        path = self._host.environ[THIS_JOB]
        with open(path, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            json.dump({"meshes": meshes, "transport": where, "tls": tls}, file)
        address, port, served = await pool.serve_store(network.bind, network.advertised, 1)
        world = World(
            attempt=0,
            log_attempt=options.first_log_attempt,
            restart_count=0,
            replicas=(0,),
            local_world_sizes=(1,),
            master_addr=address,
            master_port=port,
            agent_store=served,
            run_id=options.run_id,
        )
        await pool.launch(world)

    async def wait(self) -> Sequence[RankExit]:
        """Wait until the script has ended and return its exit."""
        assert self._run.pool is not None
        await self._run.pool.watch()
        return self._run.pool.exits()

    async def stop(self, number: int) -> None:
        """Stop the script (see ``Script``)."""
        if self._run.pool is not None:
            await self._run.pool.stop(number, self._host.grace)

    async def _hosts_of_other_roles(self) -> dict[str, list[str]]:
        """Wait for the hosts of the other roles; return their Monarch addresses by role, in the order of replicas."""
        options, environ = self._host.options, self._host.environ
        text = options.peers or environ.get("MONARCH_PEERS", "")
        peers = dict(peer.split("=", 1) for peer in text.split(",") if peer)
        peers.pop(options.role, None)
        waiting = asyncio.gather(*(self._hosts_of(role, where) for role, where in peers.items()))
        found = await self._host.reporter.while_waiting(waiting, lambda: f"the hosts of {', '.join(peers)}")
        return dict(zip(peers, found, strict=True))

    async def _hosts_of(self, role: str, where: str) -> list[str]:
        """Return the Monarch addresses of the hosts of another role, whose replica 0 has the address ``where``."""
        options, roles = self._host.options, self._host.roles
        until = asyncio.get_running_loop().time() + options.host_timeout
        if roles is not None and roles.server is not None and is_registered_address(where):
            address = await roles.find(role, self._control.network, options.host_timeout)
        else:
            expanded = local_addresses.expand_address(where, self._host.environ, is_first=False)
            address = Address.parse(expanded, f"role {role}")
        while True:
            try:
                state = await self._look(address)
                if not state["missing"]:
                    return [host["address"] for host in sorted(state["hosts"], key=lambda one: one["replica"])]
                why = f"replica {', '.join(map(str, state['missing']))} of role {role} is missing"
            except ConnectError as error:
                why = f"role {role}: {error}"
            if asyncio.get_running_loop().time() > until:
                raise ConnectError(f"{why} after {options.host_timeout:g} s (--host-timeout)")
            await asyncio.sleep(0.1)

    async def _look(self, address: Address) -> dict[str, Any]:
        """Return the answer of another role's replica 0 to ``look``."""
        identity, peer_timeout = self._control.network.identity, self._host.options.peer_timeout
        reader, writer = await connections.connect(address, identity, peer_timeout)
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
