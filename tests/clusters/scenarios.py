# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What every backend is tried for: the rows of the table in docs/backends.md, and what cannot be tried and why.

A test says which of these it is by ``@pytest.mark.scenario("retries", wire="real")``; see ``table``.
"""

from __future__ import annotations

import os

SCENARIOS = (
    "two hosts, digits",
    "lost host replaced",
    "cancel while pending",
    "cancel while running",
    "status and log long after, elsewhere",
    "describe gives the original app",
    "list once each",
    "delete leaves nothing",
    "root cause in status",
    "retries",
    "environment arrives whole",
    "preemption",
    "credentials not on show",
    "log follow, since, until",
    "bad options named",
    "missing tool says what to install",
)

BACKENDS = ("local", "docker", "slurm", "kubernetes", "aws_batch")
"""Columns: the folders of this one, and tests/local. A column without any test is left out."""

WIRES = {
    "real": "tested real",
    "api-server": "tested on a real API server, with stand-ins for nodes and controllers",
    "moto+docker": "tested on a fake wire (moto, containers in a real dockerd)",
    "fake": "tested on a fake wire",
}
"""What a test's ``wire`` is in the table. Where tests of one cell differ, the first of these counts."""

REASONS: dict[str, dict[str, str]] = {
    "local": {
        "credentials not on show": "hosts of one machine meet at socket files of their own and need none",
        "missing tool says what to install": "it needs nothing beside this package",
    },
    "docker": {},
    "slurm": {},
    "kubernetes": {},
    "aws_batch": {
        "lost host replaced": "AWS Batch replaces no node of a job: it starts all of it again (max_retries)",
    },
}
"""By backend and scenario: why there is no test. It stands in the table behind "not possible, because"."""


def elsewhere() -> frozenset[str]:
    """The backends whose tests run on a cluster that somebody has named, instead of one of the tests' own."""
    return frozenset({"kubernetes"} if os.environ.get("TEST_KUBECONFIG") else ())
