# SPDX-License-Identifier: BSD-3-Clause
"""Five machines for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clusters.packages import skip_for
from tests.clusters.ssh.apps import Apps
from tests.clusters.ssh.machines import Machines, missing
from tests.waits import until


@pytest.fixture(scope="session")
def all_machines() -> Iterator[Machines]:
    """Yield m1 to m5. Where there can be none the test is skipped; in CI that is a mistake, and fails it."""
    skip_for(missing())
    machines = Machines(5)
    try:
        yield machines.up()
    finally:
        machines.down()
    until(lambda: machines.left() == [], lambda: f"the end of {machines.left()}")


@pytest.fixture
def machines(leaves_nothing: None, all_machines: Machines, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    """Yield them, all switched on, with PATH such that ``ssh`` knows them. What a test leaves running fails it."""
    all_machines.mend()
    for name, value in all_machines.environ.items():
        monkeypatch.setenv(name, value)
    yield all_machines
    all_machines.mend()
    left = all_machines.end_processes()
    assert not left, f"left running: {left}"


@pytest.fixture
def apps(machines: Machines) -> Iterator[Apps]:
    """Yield apps on the machines. Files that a test leaves of them fail it."""
    apps = Apps(machines)
    yield apps
    apps.close()
    # The far end of a connection may be busy with an order when the connection ends.
    until(lambda: not any("in_job.entry" in line for line in machines.processes()), "the ends of connections")
    assert apps.files() == []
