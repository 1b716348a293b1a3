# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The address of a worker loop without Monarch, and its port before Monarch runs, which notices the first client.

A host that is alone in its mesh needs Monarch for clients only, which few jobs have. Monarch costs a process 46 MB of
its own memory and 0.15 s of processor time.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket

_DIGITS = "23456789abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ"
"""The digits of base 58 but for zero, which is ``1``: Monarch does not print an id's leading zeros, so an id with some
would not be recognized in its messages (``attachment``)."""


def new_service_id() -> str:
    """Return a random service id of a worker loop.

    A host with a service id is identified by that id, and not by the address that it believes it serves. An id of
    Monarch's own is a number of 64 bits in base 58. Ten digits of that base fit into 64 bits whatever they are.
    """
    return f"service<{''.join(secrets.choice(_DIGITS) for _ in range(10))}>"


class WorkerPort:
    """Listen where a worker loop will listen, until a client connects.

    Args:
        serve_address: service id and URL of the worker loop (see ``monarch_api.start_worker``). The socket of ``:fdN``
            stays open for Monarch.

    Raises:
        OSError: nothing can listen there.
    """

    def __init__(self, serve_address: str) -> None:
        scheme, _, where = serve_address.partition("@")[2].partition("://")
        self._path = where if scheme == "ipc" else ""
        if self._path:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.bind(self._path)
            os.chmod(self._path, 0o600)
        else:
            self._socket = socket.socket(fileno=int(where.rpartition(":fd")[2]))
        self._socket.listen()

    async def client_connected(self) -> None:
        """Wait until a client has connected, and hand the port over to Monarch.

        Monarch accepts the connection from the queue of a TCP socket. It cannot adopt a unix socket: the connection is
        closed, and the client's Monarch connects again until the worker loop listens.
        """
        loop, connected = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._socket, connected.set)
        try:
            await connected.wait()
        finally:
            loop.remove_reader(self._socket)
        if self._path:
            os.unlink(self._path)
            self._socket.close()
        else:
            self._socket.detach()
