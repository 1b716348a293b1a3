# SPDX-License-Identifier: BSD-3-Clause
"""Read the results of hosts that must not be restarted: dockerd restarts them regardless, once; they end with code 0.

Such a host has written its result to a marker file in its container (``host.no_restart_marker``). The marker gives the
final state of the replica; the state that dockerd reports is that of a later start, in which no rank ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchx_monarch.backends.docker import request
from torchx_monarch.backends.docker.native import environment, map_concurrently, read_file
from torchx_monarch.model.host_result import HostResult

if TYPE_CHECKING:
    from docker.models.containers import Container


class HostResults:
    """Read the marker files of containers, and cache them for callers that poll."""

    def __init__(self) -> None:
        self._known: dict[str, HostResult] = {}
        self._without: set[tuple[str, str]] = set()

    def read(self, containers: Sequence[Container]) -> Mapping[str, HostResult]:
        """Return the results that hosts have written, by the id of the container."""
        map_concurrently(self._look, [container for container in containers if self._may_have_result(container)])
        return self._known

    def _may_have_result(self, container: Container) -> bool:
        """Whether to read the marker: only of a container of which a start has failed, and once for each start.

        A host writes the marker as the last action of a start.
        """
        state: Mapping[str, Any] = container.attrs["State"]
        if str(container.id) in self._known or request.STARTS not in environment(container):
            return False
        if state["Status"] == "running":
            restarts: int = container.attrs.get("RestartCount", 0)
            return restarts > 0 and (str(container.id), state["StartedAt"]) not in self._without
        if state["Status"] in ("restarting", "created"):
            return bool(state["Status"] == "restarting")
        return bool(state["ExitCode"] != 0 or container.attrs.get("RestartCount", 0))

    def _look(self, container: Container) -> None:
        paths = environment(container)[request.STARTS].split(":")
        text = next((text for path in paths if (text := read_file(container, path))), "")
        result = HostResult.from_text(text)
        if result.forbids_restart:
            self._known[str(container.id)] = result
        elif container.attrs["State"]["Status"] == "running":
            self._without.add((str(container.id), container.attrs["State"]["StartedAt"]))
