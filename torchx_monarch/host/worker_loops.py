# SPDX-License-Identifier: BSD-3-Clause
"""The Monarch worker loops of a host, one process for each attached client; the socket at which ranks attach or wait
for a debugger.

A process of its own, because the ranks must not notice: Monarch takes the GIL and signals of the process that it runs
in, and prints to its stdout. The process (``worker_loop_main``) ends when the host closes its stdin, or ends itself.
The processes of actors are its children; they have the environment, working folder and output of the role.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
from typing import IO

from torchx_monarch.controller.host_messages import WorkerLoopEnded
from torchx_monarch.controller.host_network import Peer, RendezvousError, Streams
from torchx_monarch.host.host import Host
from torchx_monarch.host.ranks.rank_output import OutputPipe
from torchx_monarch.model.env_names import JOB_VARIABLES, MONARCH_NOISE, is_for_hosts
from torchx_monarch.model.job_result import describe_code
from torchx_monarch.model.world import LaunchError
from torchx_monarch.system import children, processes, run_dirs
from torchx_monarch.system.console import Console
from torchx_monarch.transport import local_addresses, messages
from torchx_monarch.transport.connections import Address, ConnectError, peer_pid

SCHEMES = {"unix": "ipc", "tls": "tls", "insecure-tcp": "tcp"}
"""Monarch's scheme for each scheme of a rendezvous address."""

_END_TIMEOUT = 5.0
"""Seconds for the process of a worker loop to end itself and all processes of actors."""

_GREETING_TIMEOUT = 5.0
"""Seconds for a rank to say what it wants."""

_MAX_TEXT = 1000
"""Characters of a file's path or a function's name."""

_RETRY_EVERY = 0.1
"""Seconds until the next try to connect to another role, which may still be starting."""


def _open_output(console: Console, given: contextlib.ExitStack, owned: contextlib.ExitStack) -> int:
    """Open a descriptor, closed with ``given``, whose output is copied to the host's until the end of ``owned``."""
    read, write = os.pipe()
    given.callback(os.close, write)
    output = OutputPipe(os.fdopen(read, "rb", 0), None, lambda line: MONARCH_NOISE.fullmatch(line) is None)
    owned.callback(output.close)
    output.assign(None, console, "")
    output.release()
    return write


class WorkerLoops:
    """Execute the requests ``RunWorkerLoop`` and ``GetWorkerLoop``."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._addresses: dict[str, asyncio.Future[str]] = {}
        self._numbers = itertools.count()

    async def run(self, token: str) -> WorkerLoopEnded:
        """Run a worker loop until it ends; end it if the request is cancelled."""
        address = self._addresses[token] = asyncio.get_running_loop().create_future()
        address.add_done_callback(lambda done: done.cancelled() or done.exception())
        reason, shut_down = "has not started", False
        try:
            # A short name: a socket's path has at most 107 bytes.
            os.mkdir(folder := os.path.join(self._host.sockets, str(next(self._numbers))), 0o700)
            reason, shut_down = await self._run(folder, address)
        except OSError as error:
            reason = f"cannot be started: {error}"
        finally:
            if not address.done():
                address.set_exception(LaunchError(reason))
            del self._addresses[token]
        return WorkerLoopEnded(reason, shut_down)

    async def get(self, token: str) -> str:
        """Wait until a worker loop listens; return its address. ``LaunchError`` if it has ended before."""
        address = self._addresses.get(token)
        if address is None:
            raise LaunchError("it has ended")
        return await asyncio.shield(address)

    async def _run(self, folder: str, address: asyncio.Future[str]) -> tuple[str, bool]:
        host, network = self._host, self._host.network
        spec = {
            "folder": folder,
            "scheme": SCHEMES[network.rendezvous.scheme],
            "advertised": network.advertised,
            "bind": host.options.bind,
            "ports": host.options.ports,
            "tls": network.identity.files if network.identity else None,
            "lease": host.options.lease,
        }
        left_out = {name for name in host.environ if is_for_hosts(name)} | set(JOB_VARIABLES) - {processes.MARKER}
        environ = {name: value for name, value in host.environ.items() if name not in left_out}
        with contextlib.ExitStack() as owned, contextlib.ExitStack() as given:
            owned.callback(host.disk.call, run_dirs.remove_tree, folder)
            stdout, stderr = (_open_output(console, given, owned) for console in (host.stdout, host.stderr))
            read, write = os.pipe()
            given.callback(os.close, write)
            reports = owned.enter_context(os.fdopen(read, "rb", 0))
            child, process = children.start(
                [sys.executable, "-m", "torchx_monarch.host.worker_loop_main", str(write)],
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[write],
                env={**environ, "TMPDIR": folder},
            )
            given.close()
            try:
                with process:  # whose stdin is closed at the end
                    assert process.stdin is not None
                    process.stdin.write(json.dumps(spec).encode() + b"\n")
                    end = await self._follow(reports, address)
            finally:
                code = await self._end(child)
            if end is None:
                return f"has ended: its process {describe_code(code)}", False
            return str(end["reason"]), end["shut_down"] is True

    async def _follow(self, pipe: IO[bytes], address: asyncio.Future[str]) -> messages.Message | None:
        """Read what the process of a worker loop reports; return its report of the end, None if there is none."""
        reader = asyncio.StreamReader(messages.MAX_LINE)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            while report := await messages.receive(reader):
                if "address" in report and not address.done():
                    address.set_result(str(report["address"]))
                if "line" in report:
                    self._host.reporter.line(f"host {self._host.options.replica}: {report['line']}")
                if "reason" in report:
                    return report
        finally:
            transport.close()
        return None

    async def _end(self, child: children.Child) -> int:
        """Wait until a worker loop has ended itself and its actors; kill it if it does not. Return its exit code."""
        try:
            return await asyncio.wait_for(child.wait(), _END_TIMEOUT)
        except asyncio.TimeoutError:
            actors = processes.descendants(child.pid, self._host.environ.get(processes.MARKER, ""))
            processes.kill([child.pid, *actors])
        return await child.wait()


class RankRelay:
    """Serve the socket file to which the ranks of a host connect: as clients that attach, or in a breakpoint.

    This host connects to a replica 0 for a rank, and passes on the bytes of both. Whichever ends first, the other
    connection is closed.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        text = host.options.peers or host.environ.get("MONARCH_PEERS", "")
        self._others = dict(peer.split("=", 1) for peer in text.split(",") if peer)
        self._others.pop(host.options.role, None)
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self._host.attach_socket)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if (greeting := await messages.receive(reader, _GREETING_TIMEOUT)) is None:
                return
            peer = Peer(greeting, reader, writer)
            if peer.greeting.get("type") == "breakpoint":
                await self._debug(peer)
            else:
                await self._attach(peer)
        except (messages.ProtocolError, TimeoutError) as error:
            await messages.send(writer, {"type": "refused", "reason": str(error)})
        finally:
            writer.close()

    async def _debug(self, peer: Peer) -> None:
        """Connect a rank that waits in a breakpoint (``controller.rank_clients`` has its messages)."""
        rank, line = peer.greeting.get("rank"), peer.greeting.get("line")
        if type(rank) is not int:
            return
        greeting = {
            "type": "breakpoint",
            "rank": rank,
            "pid": peer_pid(peer.writer),
            "wait": self._host.options.debug_wait,
            # With values of their types: the program may send what it likes.
            "file": str(peer.greeting.get("file"))[:_MAX_TEXT],
            "line": line if type(line) is int else 0,
            "function": str(peer.greeting.get("function"))[:_MAX_TEXT],
        }
        try:
            near, far = await self._host.network.connect(greeting)
        except Exception as error:
            why = f"replica 0 is not reached: {error}"
            self._host.reporter.line(f"rank {rank} goes on without a debugger: {why}")
            return
        returning = asyncio.ensure_future(_pass_on(near, peer.writer))
        try:
            returning.add_done_callback(lambda _: peer.writer.close())  # which ends the other direction
            await _pass_on(peer.reader, far)
            await messages.send(far, {"type": "end", "reason": "has ended"})
        finally:
            returning.cancel()
            far.close()

    async def _attach(self, peer: Peer) -> None:
        network, options = self._host.network, self._host.options
        transport = f"{SCHEMES[network.rendezvous.scheme]}://{network.advertised}:0"
        names = sorted({network.advertised, self._host.hostname, *local_addresses.interfaces().values()})
        here = {
            "role": options.role,
            "transport": transport if network.rendezvous.networked else "",
            "others": list(self._others),
            "timeout": options.host_timeout,
        }
        await peer.send({"type": "here", **here})
        role, attach = str(peer.greeting.get("role")), {"type": "attach", "names": names}
        try:
            near, far = await self._connect(role, attach)
        except (ConnectError, RendezvousError, OSError, ValueError) as error:
            await peer.send({"type": "refused", "reason": f"replica 0 is not reached: {error}"})
            return
        try:
            await peer.while_connected(_pass_on(near, peer.writer))
        finally:
            far.close()

    async def _connect(self, role: str, greeting: messages.Message) -> Streams:
        if role in ("", self._host.options.role):
            return await self._host.network.connect(greeting)
        if role not in self._others:
            raise ConnectError(f"role {role!r} has no mesh here, but {', '.join(self._others) or 'no other role'}")
        loop, timeout = asyncio.get_running_loop(), self._host.options.host_timeout
        until = loop.time() + timeout
        while True:
            try:
                expanded = local_addresses.expand_address(self._others[role], self._host.environ, is_first=False)
                address = Address.parse(expanded, f"role {role}")
                return await self._host.network.greet(address, greeting)
            except ConnectError as error:
                if loop.time() > until:
                    raise ConnectError(f"role {role}: {error}, after {timeout:g} s (--host-timeout)") from None
            await asyncio.sleep(_RETRY_EVERY)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on the bytes of a connection to another one, until either ends."""
    with contextlib.suppress(OSError, RuntimeError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
