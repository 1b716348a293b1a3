# SPDX-License-Identifier: BSD-3-Clause
"""The contract of all backends on monarch_slurm."""

from __future__ import annotations

from tests.clusters.slurm.apps import Apps
from tests.contract.contract import Contract


class TestContract(Contract):
    kind = Apps
    made_by = "apps"
