# SPDX-License-Identifier: BSD-3-Clause
"""What every backend is tested for: the rows and columns of the table in docs/reference/backends.md.

``Contract`` has a test for each scenario, marked ``@pytest.mark.scenario("retries")``. A backend's further tests may be
marked as well, with the wire that they use: ``@pytest.mark.scenario("retries", wire="fake")``; see ``table``.
"""

from __future__ import annotations

import os

SCENARIOS = (
    "two hosts, digits",
    "lost host replaced",
    "spare host",
    "cancel while pending",
    "cancel while running",
    "stacks of running ranks",
    "breakpoint on another host",
    "actors beside ranks",
    "attach to a batch job",
    "attach during a run",
    "status and log long after, elsewhere",
    "describe gives the original app",
    "list once each",
    "reading changes nothing",
    "delete leaves nothing",
    "root cause in status",
    "retries",
    "elastic role",
    "environment arrives whole",
    "preemption",
    "credentials not on show",
    "log follow, since, until",
    "bad options named",
    "missing tool says what to install",
    "containers: pyxis",
)

ONLY = {"containers: pyxis": ("slurm", "it is Slurm's")}
"""Scenarios of one backend: its name, and why the others cannot do them."""

BACKENDS = ("local", "docker", "slurm", "ssh", "kubernetes", "aws_batch")
"""The columns: the folders of tests/clusters, and tests/local/test_contract.py."""

WIRES = {
    "real": "real",
    "api-server": "API server",
    "moto+docker": "moto",
    "stub": "stub",
    "fake": "fake wire",
}
"""How the table names a test's ``wire``. Where tests of one cell differ, the first of these counts."""


def others_cannot(backend: str) -> dict[str, str]:
    """Return why a backend cannot do the scenarios of other backends (``ONLY``), by scenario."""
    return {name: reason for name, (owner, reason) in ONLY.items() if owner != backend}


def elsewhere() -> frozenset[str]:
    """Return the backends whose tests run on a cluster that the environment names, instead of one of the tests' own."""
    return frozenset({"kubernetes"} if os.environ.get("TEST_KUBECONFIG") else ())
