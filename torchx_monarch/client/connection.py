# SPDX-License-Identifier: BSD-3-Clause
"""Resolve an app handle to the address and the credentials of replica 0 of a role, and connect to it.

The connection is blocking, because programs and notebooks that use it have no event loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import ssl
import tempfile
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from torchx_monarch.backends.core import state_files, stored_apps
from torchx_monarch.exceptions import RefusedError, UnreachableError
from torchx_monarch.system.untrusted_text import one_line
from torchx_monarch.transport import messages
from torchx_monarch.transport.address import REPLICA0_NAME, Address, AddressError, explain

TIMEOUT = 15.0
"""Seconds for establishing a connection, and the default number of seconds for an answer."""

_SEND_TIMEOUT = 300.0
"""Seconds until replica 0, or a tunnel to it, has taken a message: one that is frozen takes none."""

_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""Options with which the kernel breaks a connection to a machine that is silent for 25 s. A client that follows a run
then connects again, and loses nothing."""


@dataclasses.dataclass(frozen=True, repr=False)
class Target:
    """The address of one role of an app, with the credentials to connect to it.

    Attributes:
        role: name of the role; empty for the role that listens at the address.
        credentials: text of ``transport.credentials.ClientCredentials``; empty if this machine has none.
    """

    address: Address
    role: str = ""
    credentials: str = ""

    @classmethod
    def from_handle(cls, handle: str, role: str = "", address: str = "", runner: Runner | None = None) -> Target:
        """Resolve the handle of an app.

        Args:
            address: ``HOST:PORT`` to dial instead of the scheduler's address, such as the local end of a tunnel; or a
                complete address, ``unix:PATH``, ``tls:HOST:PORT`` or ``insecure-tcp:HOST:PORT``. Empty to ask the
                scheduler.

        Raises:
            UnreachableError: this machine cannot determine the address; the message says what is missing.
            UserError: the app has no such role, or its scheduler is of another package.
        """
        from torchx.specs import parse_app_handle

        scheduler, _, app_id = parse_app_handle(handle)
        stored = stored_apps.load_credentials(scheduler, app_id)
        credentials, addresses = stored.credentials, stored.rendezvous
        if address:
            scheme = addresses.get(role or next(iter(addresses), ""), "tls:").partition(":")[0]
            is_full = address.startswith(("unix:", "tls:", "insecure-tcp:"))
            return cls(_parsed(address if is_full else f"{scheme}:{address}", "address"), role, credentials)
        if not addresses:
            return cls(_on_this_machine(handle, app_id, role, runner), role)
        role = role or next(iter(addresses))
        _check_role(handle, role, addresses)
        there = _parsed(addresses[role], f"the address in {stored_apps.credentials(scheduler).path(app_id)}")
        where = Address(there.scheme, _host(handle, app_id, role, there.host, runner), there.port)
        return cls(where, role, credentials)


def _parsed(text: str, source: str) -> Address:
    try:
        return Address.parse(text, source)
    except AddressError as error:
        raise UnreachableError(one_line(str(error)), final=True) from None


def _on_this_machine(handle: str, app_id: str, role: str, runner: Runner | None) -> Address:
    from torchx_monarch.backends.local.supervision import SupervisorRequest  # needed for apps of this machine alone

    try:
        app = SupervisorRequest.load(state_files.app_paths(app_id)) if state_files.is_app_id(app_id) else None
    except state_files.DamagedFileError as error:
        raise UnreachableError(f"it is not known where the hosts of {app_id} listen: {error}") from None
    if app is None:
        from torchx_monarch.schedulers.monarch import opened

        with opened(handle.partition(":")[0], runner):  # raises for one of another package
            pass
        raise UnreachableError(
            f"{handle} is not known in {state_files.state_dir()}: no app of this machine, and no certificate to reach "
            "one elsewhere. The command that submits a job stores it there",
            final=True,
        )
    indices = {app_role.name: index for index, app_role in enumerate(app.roles) if app_role.spec.runs_hosts}
    if not indices:
        raise UnreachableError(f"{handle} has no hosts: {app.roles[0].spec.unwrapped}", final=True)
    _check_role(handle, role := role or next(iter(indices)), indices)
    return Address("unix", path=os.path.join(app.run_dir, f"{indices[role]}.sock"))


def _check_role(handle: str, role: str, names: Collection[str]) -> None:
    if role not in names:
        from torchx_monarch.backends.core.errors import UserError  # slow to import, as TorchX is

        raise UserError(f"{handle} has no role {role!r} with hosts of this package; it has {', '.join(names)}")


def _host(handle: str, app_id: str, role: str, stored_host: str, runner: Runner | None) -> str:
    """Return the hostname of a role's replica 0: ``stored_host``, or if it starts with ``@`` the scheduler's answer."""
    if not stored_host.startswith("@"):
        return stored_host
    from torchx_monarch.schedulers.monarch import opened

    with opened(handle.partition(":")[0], runner) as scheduler:
        host: str = scheduler.apps.address(app_id, role)
    if not host:
        raise UnreachableError(f"{handle}: its scheduler does not say yet where replica 0 of role {role!r} runs")
    return host


# -- the connection ----------------------------------------------------------------------------------------------------


class Connection:
    """A blocking connection to replica 0; a context manager that closes it.

    Methods raise ``UnreachableError`` if the connection cannot be established, breaks, has no answer in time or leads
    to another program, and ``RefusedError`` with replica 0's message if it refuses the request.
    """

    def __init__(self, connection: socket.socket, where: Address) -> None:
        self._socket = connection
        self._where = where
        self._buffer = b""
        self._lines: list[bytes] = []

    @classmethod
    def open(cls, target: Target, greeting: dict[str, Any], timeout: float = TIMEOUT) -> Connection:
        """Connect and send the greeting, to which the protocol version and the role are added."""
        try:
            data = messages.encode({"version": messages.VERSION, "role": target.role, **greeting})
        except messages.ProtocolError as error:
            raise UnreachableError(f"the request is too long: {error}", final=True) from None
        link = cls(_connected(target, timeout), target.address)
        try:
            link.send_bytes(data)
        except BaseException:
            link.close()
            raise
        return link

    @classmethod
    def dial(cls, address: Address) -> Connection:
        """Connect to a socket file without a greeting; raise OSError if nobody listens there."""
        return cls(_open_socket(address, None, TIMEOUT), address)

    def fileno(self) -> int:
        """Return the descriptor of the socket, for ``select``."""
        return self._socket.fileno()

    def send(self, message: messages.Message) -> None:
        self.send_bytes(messages.encode(message))

    def send_bytes(self, data: bytes) -> None:
        try:
            self._socket.settimeout(_SEND_TIMEOUT)
            self._socket.sendall(data)
        except OSError as error:
            raise UnreachableError(f"{self._where}: the connection broke: {error.strerror or error}") from None

    def receive(self, timeout: float | None = TIMEOUT) -> dict[str, Any] | None:
        """Return the next message; None if the connection is closed. After a TimeoutError it stays usable."""
        while not self._lines:
            try:
                self._socket.settimeout(timeout)
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                raise
            except ssl.SSLError as error:
                raise UnreachableError(str(explain(error, self._where))) from None
            except OSError:
                data = b""
            if not data:
                return None
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            self._lines = lines
        try:
            message = messages.decode(self._lines.pop(0))
        except messages.ProtocolError:
            raise UnreachableError(f"{self._where}: what listens there is another program") from None
        if "frame" in message:  # the header of a long message (transport.messages); lines have no size limit here
            return self.receive(timeout)
        if message.get("type") == "refused":
            raise RefusedError(str(message.get("reason")))
        return message

    def answer(self, timeout: float = TIMEOUT) -> dict[str, Any]:
        """Return the next message, which must arrive within ``timeout`` seconds."""
        try:
            answer = self.receive(timeout)
        except TimeoutError:
            raise UnreachableError(f"{self._where}: no answer within {timeout:g} s") from None
        if answer is None:
            raise UnreachableError(f"{self._where}: it hung up")
        return answer

    def close(self) -> None:
        """Close the connection. A ``receive`` that blocks in another thread returns None."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ask(target: Target, greeting: dict[str, Any], timeout: float = TIMEOUT) -> dict[str, Any]:
    """Send one request and return its answer; ``timeout`` seconds for the connection, and again for the answer."""
    with Connection.open(target, greeting, timeout) as link:
        return link.answer(timeout)


def _connected(target: Target, timeout: float) -> socket.socket:
    address = target.address
    context = _context(target) if address.scheme == "tls" else None
    try:
        return _open_socket(address, context, timeout)
    except (OSError, ValueError) as error:
        hint = ""
        if address.networked and not isinstance(error, ssl.SSLError):
            forward = f"ssh -N -L 9000:{address.host}:{address.port} LOGIN_NODE"
            hint = f". From outside its network forward the port, as by `{forward}`, and use --address localhost:9000"
        why = explain(error, address)
        # Not final: another program may listen there until the host is ready; Kubernetes reuses the addresses of pods.
        raise UnreachableError(f"{why}{hint}") from None


def _open_socket(address: Address, context: ssl.SSLContext | None, timeout: float) -> socket.socket:
    with contextlib.ExitStack() as unfinished:
        if not address.networked:
            connection = unfinished.enter_context(socket.socket(socket.AF_UNIX))
            connection.settimeout(timeout)
            connection.connect(address.path)
        else:
            connection = unfinished.enter_context(socket.create_connection((address.host, address.port), timeout))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE.items():
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
            if context is not None:
                connection = context.wrap_socket(connection, server_hostname=REPLICA0_NAME)
        unfinished.pop_all()
        return connection


def _context(target: Target) -> ssl.SSLContext:
    if not target.credentials:
        raise UnreachableError(
            f"{target.address}: there is no certificate to reach it with. The machine that submitted the job keeps it, "
            "in its state directory, as clients/SCHEDULER/APP",
            final=True,
        )
    from torchx_monarch.transport.credentials import ClientCredentials

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        credentials = ClientCredentials.from_text(target.credentials)
        context.load_verify_locations(cadata=credentials.authority)
        # SSLContext.load_cert_chain reads certificates from files only.
        with tempfile.NamedTemporaryFile("w", prefix="tm-client") as file:
            file.write(credentials.certificate + credentials.key)
            file.flush()
            context.load_cert_chain(file.name)
    except (OSError, ValueError, TypeError) as error:  # an SSLError is an OSError; TypeError: its PEM is not ASCII
        why = f"the certificate to reach it with (clients/SCHEDULER/APP) cannot be used: {error}"
        raise UnreachableError(f"{target.address}: {why}", final=True) from None
    return context


if TYPE_CHECKING:
    from torchx.runner import Runner
