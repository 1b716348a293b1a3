# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The network that all apps' containers are on: TorchX's, made when it is missing, removed when nobody is on it.

One for all apps, not one each: a daemon has addresses for some thirty networks, and ended apps keep theirs.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from docker.errors import APIError, NotFound
from torchx.schedulers.docker_scheduler import NETWORK

if TYPE_CHECKING:
    from docker import DockerClient


def ensure(client: DockerClient) -> None:
    """Make the network if there is none.

    Upstream does so under a lock file in /tmp, which only the user who was first can open.
    """
    if _all(client):
        return
    try:
        ours = client.networks.create(NETWORK, driver="bridge", check_duplicate=True)
    except APIError as error:
        if "already exists" not in str(error):
            raise
        return
    # Older daemons make two of one name for two who ask at a time. All see the same first one, and remove theirs.
    if _all(client)[0].id != ours.id:
        ours.remove()


def is_missing(error: NotFound) -> bool:
    """Whether a container could not be started for want of the network: the last app on it was deleted meanwhile."""
    return f"network {NETWORK} not found" in str(error)


def remove_unused(client: DockerClient) -> None:
    """Remove the network unless there are containers on it, be they stopped or not ours."""
    if client.containers.list(all=True, sparse=True, limit=1, filters={"network": NETWORK}):
        return
    for network in _all(client):
        # Refused when a container has come meanwhile.
        with contextlib.suppress(APIError):
            network.remove()


def _all(client: DockerClient) -> list[Any]:
    """The networks of that name, the eldest first."""
    found = [each for each in client.networks.list(names=[NETWORK]) if each.name == NETWORK]
    return sorted(found, key=lambda each: (each.attrs["Created"], each.id))
