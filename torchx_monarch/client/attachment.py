# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Connect this process, as a Monarch client, to the hosts of a job (see ``controller.actor_controller``)."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from torchx.runner import Runner, get_runner

from torchx_monarch.client.connection import Connection
from torchx_monarch.client.target import Target
from torchx_monarch.exceptions import ClientError, UnreachableError
from torchx_monarch.transport import local_addresses
from torchx_monarch.transport.address import Address
from torchx_monarch.transport.local_addresses import NetworkOptions

_ANSWER_EVERY = 5.0
"""Seconds of waiting for hosts after which the caller looks whether the job still lives."""

_STOP_TIMEOUT = 5.0
"""Seconds that Monarch has to stop what this process has started on hosts that are to end."""


class NotYetError(Exception):
    """The hosts of a role are not there yet; the message says why."""


@dataclasses.dataclass
class Attachment:
    """An open connection to replica 0 of a role: as long as it is open, the hosts have a client.

    Attributes:
        link: the connection.
        address: where replica 0 listens.
        addresses: Monarch's, of the hosts, by replica.
        leaf: certificate, key and authority for Monarch's TLS, as PEM; None on one machine.
    """

    link: Connection
    address: Address
    addresses: list[str]
    leaf: Mapping[str, str] | None

    @classmethod
    def open(cls, handle: str, role: str, runner: Runner) -> Attachment:
        """Attach to the hosts of a role.

        Args:
            handle: TorchX's, of the app.
            role: whose hosts.
            runner: to ask where they are.

        Raises:
            NotYetError: they are not all there.
            RefusedError: replica 0 lets nobody attach.
        """
        try:
            target = Target.of(handle, role, runner=runner)
            names = sorted({*local_addresses.interfaces().values(), socket.gethostname()})
            link = Connection.open(target, {"type": "attach", "names": names})
        except UnreachableError as error:
            raise NotYetError(str(error)) from None
        try:
            answer = link.receive(_ANSWER_EVERY)
        except (UnreachableError, TimeoutError) as error:
            link.close()
            raise NotYetError(f"the hosts of role {role} are not all there: {error}") from None
        if answer is None:
            link.close()
            raise NotYetError(f"replica 0 of role {role} hung up")
        hosts = sorted(answer["hosts"], key=lambda host: int(host["replica"]))
        first, *others = (str(host["address"]) for host in hosts)
        if target.address.networked:  # this machine may know replica 0 by another name than the other hosts do
            first = re.sub(r"://[^:/]+:", f"://{target.address.host}:", first)
        return cls(link, target.address, [first, *others], answer["leaf"])

    @property
    def is_open(self) -> bool:
        """Whether the hosts are still there."""
        try:
            return self.link.receive(0.001) is not None
        except TimeoutError:  # they have nothing to say
            return True
        except (UnreachableError, OSError, ValueError):
            return False


class Live:
    """What a job has open in this process.

    Args:
        stop_mesh: has Monarch stop a mesh within a number of seconds.
    """

    def __init__(self, stop_mesh: Callable[[Any, float], None]) -> None:
        self._stop_mesh = stop_mesh
        self._runner: Runner | None = None
        self._attachments: dict[str, Attachment] = {}
        self.meshes: list[Any] = []

    @property
    def runner(self) -> Runner:
        """TorchX's."""
        if self._runner is None:
            self._runner = get_runner()
        return self._runner

    def attachment(self, role: str) -> Attachment | None:
        """The open connection to the hosts of a role."""
        found = self._attachments.get(role)
        return found if found is not None and found.is_open else None

    def keep(self, role: str, attachment: Attachment) -> None:
        """Hold on to a connection, and let go of the one before it."""
        before = self._attachments.pop(role, None)
        self._attachments[role] = attachment
        if before is not None:
            before.link.close()

    @property
    def is_open(self) -> bool:
        """Whether there are hosts at the other end."""
        return any(attachment.is_open for attachment in self._attachments.values())

    def close(self) -> None:
        """Stop what this process has started on the hosts, if they are there, and hang up."""
        for mesh in self.meshes if self.is_open else ():
            with contextlib.suppress(Exception):
                self._stop_mesh(mesh, _STOP_TIMEOUT)
        self.meshes.clear()
        for attachment in self._attachments.values():
            attachment.link.close()
        self._attachments.clear()


class _Client:
    """This process as a Monarch client over a network: one address, one certificate."""

    def __init__(self) -> None:
        self._folder = ""
        self._url = ""
        self._lives: dict[Live, str] = {}

    def join(self, handle: str, live: Live, attachment: Attachment) -> tuple[str, list[str]]:
        """Where to listen as a client of these hosts, and the files for TLS; both empty on one machine.

        Args:
            handle: of the app.
            live: to whom the attachment belongs.
            attachment: to the hosts.

        Raises:
            ClientError: it is the client of another job over a network.
        """
        address = attachment.address
        if not address.networked:
            return "", []
        self._lives = {each: app for each, app in self._lives.items() if each.is_open}
        for other in set(self._lives.values()) - {handle}:
            raise ClientError(
                f"this process is a client of {other}, and Monarch has one certificate for each process: kill() that "
                "job first, or use another process"
            )
        self._lives[live] = handle
        if not self._url:
            here = local_addresses.advertised(address, False, NetworkOptions())
            self._url = f"{'tls' if attachment.leaf else 'tcp'}://{here}:0"
        return self._url, self._files(attachment.leaf) if attachment.leaf else []

    def _files(self, leaf: Mapping[str, str]) -> list[str]:
        if not self._folder:
            self._folder = tempfile.mkdtemp(prefix="tm-client-")
            atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
        paths = []
        for name in ("certificate", "key", "authority"):
            path = os.path.join(self._folder, name)
            with open(path + ".new", "w", opener=lambda new, flags: os.open(new, flags, 0o600)) as file:
                file.write(leaf[name])
            os.replace(path + ".new", path)
            paths.append(path)
        return paths


client = _Client()
"""Of this process."""
