# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The process that serves the ranks' TCPStore: a fork of rank 0's interpreter, so that torch is imported once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from typing import Any

from torchx_monarch.host.rank_process import RankProcess
from torchx_monarch.model.job_result import describe_code


class StoreProcess:
    """Lives until it is closed, as long as the host does at most: it reads a pipe that only the host can close.

    Attributes:
        address: where the store listens.
        port: of the store.
        pid: of the process, a child of the host.
        ended: whether it has ended, as far as that is known.

    Args:
        address: where the store listens.
        port: of the store.
        pid: of the process.
        lifeline: the end of the pipe that the host holds.
        say: called with a line for a person when the process ends before it is closed.
    """

    def __init__(self, address: str, port: int, pid: int, lifeline: int, say: Callable[[str], None]) -> None:
        self.address = address
        self.port = port
        self.pid = pid
        self.ended = False
        self._lifeline = lifeline
        self._closed = False
        self._say = say
        # Without pidfds (an old kernel, a strict container) its death is not told, and the host's reaper collects it.
        with contextlib.suppress(AttributeError, OSError):
            self._pidfd = os.pidfd_open(pid)
            asyncio.get_running_loop().add_reader(self._pidfd, self._has_ended)

    @classmethod
    async def start(
        cls, interpreter: RankProcess, address: str, say: Callable[[str], None], port: int = 0
    ) -> StoreProcess | None:
        """Have an interpreter fork it; None when that cannot: torch is not there.

        Args:
            interpreter: of a rank, before its program.
            address: where the store listens.
            say: called with a line for a person when the process ends before it is closed.
            port: of the store; 0 for any free one.

        Raises:
            OSError: the port cannot be bound there.
        """
        theirs, lifeline = os.pipe()
        answer: dict[str, Any] | None = None
        try:
            with bound(address, port, reuse=port != 0) as listener:
                passed = [theirs, listener.fileno()]
                answer = await interpreter.ask({"op": "store", "address": address}, passed)
                port = listener.getsockname()[1]
        finally:
            os.close(theirs)
            if answer is None or "pid" not in answer:
                os.close(lifeline)  # it leaves, if it has been forked
        return cls(address, port, answer["pid"], lifeline, say) if answer and "pid" in answer else None

    def close(self) -> None:
        """Have it leave."""
        if not self._closed:
            self._closed = True
            os.close(self._lifeline)

    def _has_ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.ended = True
        code = None
        with contextlib.suppress(ChildProcessError):
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if not self._closed:
            how = "ended" if code is None else describe_code(code)
            self._say(f"the process of the ranks' TCPStore (pid {self.pid}) {how}; ranks that need it will fail")


def bound(address: str, port: int, reuse: bool) -> socket.socket:
    """A socket that holds a port before anybody hears of it.

    Args:
        address: the local address; empty for all.
        port: 0 for any free one.
        reuse: whether the port may have connections of an earlier listener, or another socket that does not listen.

    Raises:
        OSError: it cannot be bound.
    """
    held = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        held.bind((address, port))
    except OSError:
        held.close()
        raise
    return held
