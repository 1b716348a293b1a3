# SPDX-License-Identifier: BSD-3-Clause
"""Connect this process, as a Monarch client, to the hosts of a job.

``controller.mesh_clients`` describes the host side of the connection.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Mapping
from importlib import metadata

from torchx_monarch.client.connection import Connection
from torchx_monarch.client.target import Target
from torchx_monarch.exceptions import ClientError, UnreachableError
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.system import safe_files
from torchx_monarch.transport import local_addresses
from torchx_monarch.transport.address import Address

_HOSTS_TIMEOUT = 5.0
"""Seconds to wait until the hosts are together; then the caller checks whether the job is still alive, and retries."""

_START_TIMEOUT = 90.0
"""Seconds to wait for the worker loops of the hosts, for which replica 0 waits 60 s."""


@dataclasses.dataclass(eq=False)
class Attachment:
    """Hold a connection to replica 0 of a role. The hosts count this process as their client while it is open.

    Attributes:
        link: the connection.
        address: where replica 0 listens.
        addresses: Monarch addresses of the hosts, ordered by replica id.
        leaf: ``certificate``, ``key`` and ``authority`` for Monarch's TLS, as PEM; None if all hosts run on this
            machine.
        stale: whether one of the hosts is lost, or its worker loop has ended, as far as ``is_open`` has read it.
    """

    link: Connection
    address: Address
    addresses: list[str]
    leaf: Mapping[str, str] | None
    stale: bool = False

    @classmethod
    def open(cls, target: Target, whose: str) -> Attachment:
        """Attach to the hosts of a role, whose replica 0 is the target.

        Raises:
            UnreachableError: not all hosts of the role have started, or replica 0 cannot be reached.
            RefusedError: replica 0 does not accept clients, or a host cannot start its worker loop.
            ClientError: the hosts have another version of Monarch than this process.
        """
        names = sorted({*local_addresses.interfaces().values(), socket.gethostname()})
        link = Connection.open(target, {"type": "attach", "names": names})
        try:
            return cls.receive(link, target.address, whose)
        except BaseException:
            link.close()
            raise

    @classmethod
    def receive(cls, link: Connection, address: Address, whose: str, timeout: float = _HOSTS_TIMEOUT) -> Attachment:
        """Receive the answer to the greeting; exceptions as for ``open``.

        Args:
            address: where replica 0 of the role listens.
            timeout: seconds to wait until the hosts are together.
        """
        try:
            answer = link.answer(timeout)  # attaching
            if answer["type"] != "attached":
                answer = link.answer(_START_TIMEOUT)
        except UnreachableError as error:
            raise UnreachableError(f"the hosts of {whose} are not all there: {error}", error.final) from None
        if (theirs := answer["monarch"]) != (ours := metadata.version("torchmonarch")):
            raise ClientError(f"the hosts of {whose} have torchmonarch {theirs}, and this process {ours}")
        hosts = sorted(answer["hosts"], key=lambda host: int(host["replica"]))
        first, *others = (str(host["address"]) for host in hosts)
        if address.networked:  # this machine may reach replica 0 under another name than the other hosts do
            first = re.sub(r"://[^:/]+:", f"://{address.host}:", first)
        return cls(link, address, [first, *others], answer["leaf"])

    @property
    def is_open(self) -> bool:
        """Whether replica 0 still holds the connection."""
        try:
            while self.link.receive(0.001) is not None:  # replica 0 sends nothing but ``changed`` after its answer
                self.stale = True
            return False
        except TimeoutError:
            return True
        except (UnreachableError, OSError, ValueError):
            return False


class _Client:
    """Manage this process's identity as a Monarch client over a network.

    Monarch allows one listening address and one certificate for each process, so a process can be a client of one
    networked job at a time.
    """

    def __init__(self) -> None:
        self._folder = ""
        self._url = ""
        # They must outlive the job object: ``SPMDJob.attach(handle).state().workers``.
        self._attached: dict[Attachment, str] = {}

    def join(self, handle: str, attachment: Attachment) -> tuple[str, list[str]]:
        """Return the URL to listen on as a client of these hosts, and the paths of the TLS files.

        Args:
            handle: the handle of their job.

        Returns:
            The URL, and the paths of certificate, key and authority. The URL is empty if the hosts run on this machine;
            the paths are empty without TLS.

        Raises:
            ClientError: this process is the client of another job over a network, or was that of one with TLS and this
                one is without, or the reverse.
        """
        address = attachment.address
        self._attached = {other: job for other, job in self._attached.items() if other.is_open}
        if not address.networked:
            self._attached[attachment] = handle
            return "", []
        for other, job in self._attached.items():
            if other.address.networked and job != handle:
                raise ClientError(
                    f"this process is a client of {job}, and Monarch has one certificate for each process: kill() that "
                    "job first, or use another process"
                )
        scheme = "tls" if attachment.leaf else "tcp"
        if not self._url:
            here = local_addresses.advertised(address, False, HostSpec())
            self._url = f"{scheme}://{here}:0"
        elif not self._url.startswith(scheme):  # its hosts would connect to it without TLS
            raise ClientError(
                f"this process was the client of a job {'without' if attachment.leaf else 'with'} TLS, unlike "
                f"{handle}, and Monarch has one listening address for each process: use another process"
            )
        self._attached[attachment] = handle
        return self._url, self.files(attachment.leaf) if attachment.leaf else []

    def files(self, leaf: Mapping[str, str]) -> list[str]:
        """Write a certificate into files of this process; return the paths of certificate, key and authority."""
        if not self._folder:
            self._folder = tempfile.mkdtemp(prefix="tm-client-")
            atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
        paths = []
        for name in ("certificate", "key", "authority"):
            path = os.path.join(self._folder, name)
            safe_files.replace_file(path, leaf[name].encode())
            paths.append(path)
        return paths


client = _Client()
"""The client identity of this process."""
