# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The agent, an actor on each host through which the controller starts and stops the ranks of that host."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from typing import Any

from monarch.actor import Actor, concurrent_endpoint

from torchx_monarch.system import processes
from torchx_monarch.transport.agent_rpc import SOCKET_VARIABLE, AgentClient

_FOR_THE_HOST = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


class Agent(Actor):  # type: ignore[misc]
    """Pass the controller's requests to the host process, the parent of the ranks.

    The endpoint is concurrent. Otherwise Monarch would handle one message at a time, and a ``stop`` request would wait
    for the ``watch`` request that it is meant to end.
    """

    def __init__(self) -> None:
        # Slurm and terminals signal all processes of a job. The host process handles the signal, and needs its agent.
        processes.ignore_signals(_FOR_THE_HOST)
        # Connect in the constructor: the end of this connection tells the host process that the agent has died.
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.environ[SOCKET_VARIABLE])
        self._link: asyncio.Future[AgentClient] | None = None

    @concurrent_endpoint  # type: ignore[untyped-decorator]
    async def call(self, op: str, args: dict[str, Any]) -> Any:
        """Have the host process execute a request and return the result.

        Args:
            op: name of the request (see ``controller.host_messages``).
            args: its fields, as JSON values.

        Raises:
            AgentError: the host process answered with an error, or is gone.
        """
        if self._link is None:
            self._link = asyncio.ensure_future(AgentClient.from_socket(self._socket))
        return await (await self._link).request(op, args)
