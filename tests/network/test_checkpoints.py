# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints in the memory of hosts on machines of their own: what is left when a machine is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.local.hosts import Hosts
from tests.local.test_checkpoints import Training, begins
from tests.network.conftest import host_processes
from tests.network.namespaces import Network, kill_all, requires_namespaces

pytestmark = requires_namespaces


@pytest.mark.nightly(reason="the same as on one machine, over TLS between the hosts")
@pytest.mark.parametrize("own", [(), ("--own",)], ids=["all parts", "own parts"])
def test_the_machine_of_a_host_is_lost(folder: Path, network: Callable[[int], Network], own: tuple[str, ...]) -> None:
    machines = network(4)

    def on_machines(folder: Path, command: list[str], replicas: int, options: tuple[str, ...]) -> Hosts:
        return host_processes(folder, machines, command, replicas, options=options)

    words = ("--kill", "0:wait:5:left", *own)
    training = Training(folder, *words, hosts=3, spares=1, options=("--spares", "1"), make=on_machines)
    training.until_copied(5)
    kill_all(machines.namespace(1))
    assert begins(training.finish()) == [0, 6]
    assert "step 5 in memory (host 1's part from host 2)" in training.hosts.err()
