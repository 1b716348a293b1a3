# SPDX-License-Identifier: BSD-3-Clause
"""The process that serves the ranks' TCPStore: a fork of the zygote, so that torch is imported once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

from torchx_monarch.model.job_result import describe_code

_BACKLOG = 4096
"""Connections that wait at most until the process accepts them: ranks start at the same time as it does."""


class StoreProcess:
    """Represent a process that serves a TCPStore. Its port is open before the process begins.

    The process runs until it is closed or the host ends: it reads a pipe of which only the host has the write end.

    Attributes:
        port: port of the store.
        pid: id of the process, a child of the host; 0 before ``begin``.
        given: the read end of the pipe, and the socket of the port, which a zygote gives to the process; closed by
            ``begin`` and ``close``.

    Args:
        address: local address that the store listens on; empty for all.
        port: port of the store; 0 for any free port.
        say: called with a progress line when the process ends before it is closed.

    Raises:
        OSError: the port cannot be opened on the address.
    """

    def __init__(self, address: str, port: int, say: Callable[[str], None]) -> None:
        self.pid = 0
        self._address = address
        self._say = say
        with bound(address, port, reuse=port != 0) as listener:
            listener.listen(_BACKLOG)
            self.port: int = listener.getsockname()[1]
            read_end, self._lifeline = os.pipe()
            self.given: tuple[int, ...] = (read_end, listener.detach())
        self._closed = False

    @property
    def description(self) -> dict[str, str]:
        """The description for the zygote that forks it (see ``zygote_main``)."""
        return {"store": self._address}

    def begin(self, pid: int) -> None:
        """Watch the process, which runs now.

        Args:
            pid: process id; the process is a child of this one.
        """
        self.pid = pid
        self._close_given()
        # Without pidfds (an old kernel, a strict container) its end is not noticed; `orphan_reaper` reaps the process.
        with contextlib.suppress(AttributeError, OSError):
            self._pidfd = os.pidfd_open(pid)
            asyncio.get_running_loop().add_reader(self._pidfd, self._has_ended)

    def close(self) -> None:
        """Close the pipe, so that the process exits, and the port if the process has not begun."""
        if not self._closed:
            self._closed = True
            os.close(self._lifeline)
            self._close_given()

    def _close_given(self) -> None:
        given, self.given = self.given, ()
        for descriptor in given:
            os.close(descriptor)

    def _has_ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = None
        with contextlib.suppress(ChildProcessError):
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if not self._closed:
            how = "ended" if code is None else describe_code(code)
            self._say(f"the process of the ranks' TCPStore (pid {self.pid}) {how}; ranks that need it will fail")


def bound(address: str, port: int, reuse: bool) -> socket.socket:
    """Return a bound TCP socket that does not listen yet, so that no other process can take the port.

    Args:
        address: local address; empty for all.
        port: port; 0 for any free port.
        reuse: whether to set SO_REUSEADDR, which allows connections of an earlier listener on the port and another
            bound socket that does not listen.

    Raises:
        OSError: the port cannot be bound on the address.
    """
    held = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        held.bind((address, port))
    except OSError:
        held.close()
        raise
    return held
