# SPDX-License-Identifier: BSD-3-Clause
"""Monarch's worker loop in a host process: its addresses, and its start."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
from collections.abc import Callable

from torchx_monarch.transport import local_addresses
from torchx_monarch.transport.local_addresses import NetworkOptions

SCHEMES = {"unix": "ipc", "tls": "tls", "insecure-tcp": "tcp"}
"""Monarch's scheme for each scheme of a rendezvous address."""

_DIGITS = "23456789abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ"
"""The digits of base 58 but for zero, which is ``1``: Monarch does not print an id's leading zeros, so an id with some
would not be recognized in its messages (``attachment``)."""


def new_service_id() -> str:
    """Return a random service id of a worker loop.

    A host with a service id is identified by that id, and not by the address that it believes it serves. An id of
    Monarch's own is a number of 64 bits in base 58. Ten digits of that base fit into 64 bits whatever they are.
    """
    return f"service<{''.join(secrets.choice(_DIGITS) for _ in range(10))}>"


@dataclasses.dataclass(frozen=True)
class WorkerLoop:
    """The worker loop of this process, which listens once it is started.

    Attributes:
        address: the address with which a client attaches: service id, ``@``, and URL.
        serve_address: the same with the URL on which the loop itself listens.
        client_url: URL on which this process listens as Monarch's client.
    """

    address: str
    serve_address: str
    client_url: str

    @classmethod
    def reserve(cls, scheme: str, advertised: str, options: NetworkOptions, folder: str) -> WorkerLoop:
        """Choose the addresses and open their ports.

        Args:
            folder: folder for socket files; mode 0700.

        Raises:
            NetworkError: no port can be opened.
        """
        service = new_service_id()
        if scheme == "unix":
            client, worker = (f"ipc://{os.path.join(folder, name)}" for name in ("client", "worker"))
            return cls(f"{service}@{worker}", f"{service}@{worker}", client)
        client_socket, worker_socket = local_addresses.bind_port(options), local_addresses.bind_port(options)
        url = f"{SCHEMES[scheme]}://{advertised}"
        address = f"{service}@{url}:{worker_socket.getsockname()[1]}"
        return cls(address, f"{service}@{url}:fd{worker_socket.detach()}", f"{url}:fd{client_socket.detach()}")

    async def start(
        self,
        tls: tuple[str, str, str] | None,
        on_fault: Callable[[str], None],
        warn: Callable[[str], None],
        lease: float,
        on_shutdown: Callable[[], None],
    ) -> None:
        """Import Monarch and start the loop; see ``monarch_api.start_worker`` for the arguments.

        ``on_fault`` is called from other threads, ``warn`` and ``on_shutdown`` from the event loop.
        """
        loop = asyncio.get_running_loop()

        def in_event_loop(function: Callable[..., None], *args: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the host has ended meanwhile
                loop.call_soon_threadsafe(function, *args)

        def start() -> None:
            from torchx_monarch.monarch_adapter import monarch_api

            monarch_api.start_worker(
                self.client_url,
                self.serve_address,
                tls,
                on_fault,
                lambda text: in_event_loop(warn, text),
                lease,
                lambda: in_event_loop(on_shutdown),
            )

        await loop.run_in_executor(None, start)
