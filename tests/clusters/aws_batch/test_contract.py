# SPDX-License-Identifier: BSD-3-Clause
"""The contract of all backends on monarch_aws_batch, whose jobs run as containers."""

from __future__ import annotations

from tests.clusters.aws_batch.apps import Apps
from tests.contract.contract import Contract


class TestContract(Contract):
    kind = Apps
    made_by = "running_apps"
