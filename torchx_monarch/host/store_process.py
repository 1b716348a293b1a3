# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The process that serves the ranks' TCPStore: a fork of the zygote, so that torch is imported once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from typing import Any

from torchx_monarch.host.zygote import Zygote
from torchx_monarch.model.job_result import describe_code


class StoreProcess:
    """Represent a process that serves a TCPStore.

    The process runs until it is closed or the host ends: it reads a pipe of which only the host has the write end.

    Attributes:
        address: local address that the store listens on; empty for all.
        port: port of the store.
        pid: id of the process, a child of the host.
        ended: whether the process is known to have ended.

    Args:
        address: local address that the store listens on; empty for all.
        port: port of the store.
        pid: id of the process.
        lifeline: descriptor of the pipe's write end; owned.
        say: called with a progress line when the process ends before it is closed.
    """

    def __init__(self, address: str, port: int, pid: int, lifeline: int, say: Callable[[str], None]) -> None:
        self.address = address
        self.port = port
        self.pid = pid
        self.ended = False
        self._lifeline = lifeline
        self._closed = False
        self._say = say
        # Without pidfds (an old kernel, a strict container) its end is not noticed; `orphan_reaper` reaps the process.
        with contextlib.suppress(AttributeError, OSError):
            self._pidfd = os.pidfd_open(pid)
            asyncio.get_running_loop().add_reader(self._pidfd, self._has_ended)

    @classmethod
    async def start(
        cls, zygote: Zygote, address: str, say: Callable[[str], None], port: int = 0
    ) -> StoreProcess | None:
        """Have a zygote fork the process.

        Args:
            zygote: the zygote.
            address: local address that the store listens on; empty for all.
            say: called with a progress line when the process ends before it is closed.
            port: port of the store; 0 for any free port.

        Returns:
            None if the zygote cannot serve a store, for example without torch.

        Raises:
            OSError: the port cannot be bound on the address.
            ZygoteError: the zygote has ended or does not answer.
        """
        read_end, lifeline = os.pipe()
        answer: dict[str, Any] | None = None
        try:
            with bound(address, port, reuse=port != 0) as listener:
                passed = [read_end, listener.fileno()]
                answer = await zygote.ask({"op": "store", "address": address}, passed)
                port = listener.getsockname()[1]
        finally:
            os.close(read_end)
            if answer is None or "pid" not in answer:
                os.close(lifeline)  # the process exits, if it has been forked
        return cls(address, port, answer["pid"], lifeline, say) if answer and "pid" in answer else None

    def close(self) -> None:
        """Close the pipe, so that the process exits."""
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
