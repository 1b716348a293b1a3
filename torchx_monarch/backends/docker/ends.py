# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Hosts that are not to be started again: dockerd starts them all the same, and they end at once.

What such a host has noted in its container (``runtime.starts``) is how its replica has ended; dockerd's word is of a
later start, in which nothing was run.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchx_monarch.backends.docker import reports, request
from torchx_monarch.backends.docker.facts import Replica
from torchx_monarch.backends.docker.together import together
from torchx_monarch.errors import Verdict

if TYPE_CHECKING:
    from docker.models.containers import Container


class Ends:
    """Remembers what was found, for who looks again and again."""

    def __init__(self) -> None:
        self._known: dict[str, Replica] = {}
        self._running: set[tuple[str, float]] = set()

    def applied(self, containers: Sequence[Container]) -> list[Replica]:
        """The replica of each container, as its host has noted its end or else as dockerd has it."""
        return together(self._replica, containers)

    def _replica(self, container: Container) -> Replica:
        replica, key = Replica.of(container.attrs), str(container.id)
        start = (key, replica.started)
        if key in self._known:
            return dataclasses.replace(self._known[key], status=replica.status)
        # A host notes its end as the last thing of a start: one that is not there at the next will not come in that.
        if not replica.has_failed or start in self._running:
            return replica
        text = ""
        for path in replica.env.get(request.STARTS, "").split(":"):
            text = text or reports.read(container, path)
        if text and (noted := _noted(replica, text)) is not None:
            self._known[key] = noted
            return noted
        if replica.status == "running":
            self._running.add(start)
        return replica


def _noted(replica: Replica, text: str) -> Replica | None:
    """The replica as the note says; None where it notes no end, or is none."""
    try:
        note = json.loads(text)
        verdict = Verdict.from_json(note["verdict"])
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
