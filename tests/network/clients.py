# SPDX-License-Identifier: BSD-3-Clause
"""Clients of live allocations that no scheduler knows."""

from __future__ import annotations

from torchx_monarch.client import hosts
from torchx_monarch.client.allocation import Allocation
from torchx_monarch.client.target import Target


class Dialled(hosts.Hosts):
    """Hosts of which it is known where to dial."""

    def __init__(self, target: Target) -> None:
        super().__init__("monarch_slurm://torchx/app")
        self._there = target

    @property
    def target(self) -> Target:
        return self._there

    def check_alive(self) -> None:
        """Do nothing: no scheduler knows whether they have ended."""


class Client(Allocation):
    """The job of such hosts."""

    def __init__(self, target: Target) -> None:
        super().__init__("monarch_slurm://torchx/app")
        self._role_hosts = self.dialled = Dialled(target)
