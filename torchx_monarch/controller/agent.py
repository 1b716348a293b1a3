# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The one actor of each host, through which the controller runs and stops the ranks there."""

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
    """Passes the controller's requests to the host process, whose children the ranks are.

    The endpoint is concurrent: Monarch gives an actor one message at a time otherwise, and a request to stop would wait
    behind the one that it is to end.
    """

    def __init__(self) -> None:
        # Slurm and terminals signal all processes of a job. The host heeds that; without its agent it could do nothing.
        processes.ignore_signals(_FOR_THE_HOST)
        # At once: by the end of this connection the host learns of our death.
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.environ[SOCKET_VARIABLE])
        self._link: asyncio.Future[AgentClient] | None = None

    @concurrent_endpoint  # type: ignore[untyped-decorator]
    async def call(self, op: str, args: dict[str, Any]) -> Any:
        """Have the host process do ``op`` (see ``HostProcess._handle``).

        Raises:
            AgentError: the host could not.
        """
        if self._link is None:
            self._link = asyncio.ensure_future(AgentClient.over(self._socket))
        return await (await self._link).request(op, args)
