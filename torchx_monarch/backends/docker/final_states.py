# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Hosts that are not to be started again: dockerd starts them all the same, and they end at once.

What such a host has noted in its container (``host.no_restart_marker``) is how its replica has ended; dockerd's word is
of a later start, in which nothing was run.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchx_monarch.backends.docker import container_files, request
from torchx_monarch.backends.docker.map_concurrently import together
from torchx_monarch.backends.docker.status import DockerReplica
from torchx_monarch.model.job_result import JobResult

if TYPE_CHECKING:
    from docker.models.containers import Container


class Ends:
    """Remembers what was found, for who looks again and again."""

    def __init__(self) -> None:
        self._known: dict[str, DockerReplica] = {}
        self._running: set[tuple[str, float]] = set()

    def applied(self, containers: Sequence[Container]) -> list[DockerReplica]:
        """The replica of each container, as its host has noted its end or else as dockerd has it."""
        pairs = [(container, DockerReplica.of(container.attrs)) for container in containers]
        together(self._look, [pair for pair in pairs if self._may_have_noted(*pair)])
        return [
            dataclasses.replace(self._known[key], status=replica.status) if key in self._known else replica
            for key, replica in ((str(container.id), replica) for container, replica in pairs)
        ]

    def _may_have_noted(self, container: Container, replica: DockerReplica) -> bool:
        """Whether there may be news. A note is the last thing of a start: at the next it is there, or not."""
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
    """The replica as the note says; None where it notes no end, or is none."""
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
