# SPDX-License-Identifier: BSD-3-Clause
"""A port of this machine that leads into another network namespace, as a tunnel or ``kubectl port-forward`` does."""

from __future__ import annotations

import contextlib
import socket
import threading

from tests.network.namespaces import entered

HERE = "/proc/self/ns/net"


class Relay:
    """Brings connections to a port of 127.0.0.1 in one namespace to one of 127.0.0.1 in another. A context manager.

    Args:
        port: where to.
        there: the file of the namespace where that is.
        listens: the file of the namespace in which it is to be reached.
        at: under which port; 0 for any.
    """

    def __init__(self, port: int, there: str = HERE, listens: str = HERE, at: int = 0) -> None:
        self._port, self._there = port, there
        with entered(listens):
            self._server = socket.create_server(("127.0.0.1", at))
        self.port: int = self._server.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        for opened in [self._server, *self._open]:
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)
            opened.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                self._open.append(near)
                try:
                    with entered(self._there):
                        far = socket.create_connection(("127.0.0.1", self._port), 10)
                except OSError:
                    near.close()
                    continue
                far.settimeout(None)
                self._open.append(far)
                for source, goal in ((near, far), (far, near)):
                    threading.Thread(target=_copy, args=(source, goal), daemon=True).start()


def _copy(source: socket.socket, goal: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            goal.sendall(data)
    with contextlib.suppress(OSError):
        goal.shutdown(socket.SHUT_WR)
