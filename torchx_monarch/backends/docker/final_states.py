# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Read the results of hosts that must not be restarted: dockerd restarts them regardless, and they end immediately.

Such a host has written its result to a marker file in its container (``host.no_restart_marker``). The marker gives the
final state of the replica; the state that dockerd reports is that of a later start, in which no rank ran.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchx_monarch.backends.docker import container_files, request
from torchx_monarch.backends.docker.map_concurrently import map_concurrently
from torchx_monarch.backends.docker.status import DockerReplica
from torchx_monarch.model.job_result import JobResult

if TYPE_CHECKING:
    from docker.models.containers import Container


class FinalStates:
    """Read the marker files of containers, and cache them for callers that poll."""

    def __init__(self) -> None:
        self._known: dict[str, DockerReplica] = {}
        self._running: set[tuple[str, float]] = set()

    def apply(self, containers: Sequence[Container]) -> list[DockerReplica]:
        """Return the replica of each container: its final state from the marker, or else its state from dockerd."""
        pairs = [(container, DockerReplica.of(container.attrs)) for container in containers]
        map_concurrently(self._look, [pair for pair in pairs if self._may_have_noted(*pair)])
        return [
            dataclasses.replace(self._known[key], status=replica.status) if key in self._known else replica
            for key, replica in ((str(container.id), replica) for container, replica in pairs)
        ]

    def _may_have_noted(self, container: Container, replica: DockerReplica) -> bool:
        """Whether to read the marker. A host writes it as the last action of a start: one read per start is enough."""
        if request.STARTS not in replica.env or not replica.has_failed or str(container.id) in self._known:
            return False
        return replica.status != "running" or (str(container.id), replica.started) not in self._running

    def _look(self, pair: tuple[Container, DockerReplica]) -> None:
        container, replica = pair
        key, text = str(container.id), ""
        for path in replica.env[request.STARTS].split(":"):
            text = text or container_files.read(container, path)
        noted = _noted(replica, text)
        if noted is not None:
            self._known[key] = noted
        elif replica.status == "running":
            self._running.add((key, replica.started))


def _noted(replica: DockerReplica, text: str) -> DockerReplica | None:
    """Return the replica with the result in the marker; None if the text is no marker or holds no result."""
    try:
        note = json.loads(text)
        verdict = JobResult.from_json(note["verdict"])
        return dataclasses.replace(
            replica,
            code=int(verdict.code),
            ended=float(note["time"]),
            restarts=int(note["restarts"]),
            final=str(note["why"]),
            word=verdict.error_file(),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
