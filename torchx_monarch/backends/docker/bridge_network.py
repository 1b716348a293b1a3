# SPDX-License-Identifier: BSD-3-Clause
"""Create TorchX's bridge network, which the containers of all apps share, and remove it when no container uses it.

All apps share one network because a daemon has addresses for about thirty networks, and ended apps keep their
addresses.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from docker.errors import APIError, NotFound
from torchx.schedulers.docker_scheduler import NETWORK

if TYPE_CHECKING:
    from docker import DockerClient


def ensure(client: DockerClient) -> None:
    """Create the network if it does not exist.

    TorchX's ``ensure_network`` locks a file in /tmp, which only the user who created the file can open.
    """
    if _all(client):
        return
    try:
        made = client.networks.create(NETWORK, driver="bridge", check_duplicate=True)
    except APIError as error:
        if "already exists" not in str(error):
            raise
        return
    # Older daemons create two networks of one name for concurrent requests. Every client keeps the eldest one.
    if _all(client)[0].id != made.id:
        made.remove()


def is_missing(error: NotFound) -> bool:
    """Whether a container failed to start because the network was removed, with the last app that used it."""
    return f"network {NETWORK} not found" in str(error)


def remove_unused(client: DockerClient) -> None:
    """Remove the network unless it has containers, including stopped ones and those of other programs."""
    if client.containers.list(all=True, sparse=True, limit=1, filters={"network": NETWORK}):
        return
    for network in _all(client):
        # dockerd refuses if a container has joined since.
        with contextlib.suppress(APIError):
            network.remove()


def _all(client: DockerClient) -> list[Any]:
    """Return the networks with TorchX's name, eldest first."""
    found = [network for network in client.networks.list(names=[NETWORK]) if network.name == NETWORK]
    return sorted(found, key=lambda network: (network.attrs["Created"], network.id))
