# SPDX-License-Identifier: BSD-3-Clause
"""The contract of all backends on monarch_kubernetes."""

from __future__ import annotations

import pytest

from tests.clusters.kubernetes.apps import Apps
from tests.contract.contract import Contract

# The first test starts the cluster, and may have to build it.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


class TestContract(Contract):
    kind = Apps
    made_by = "apps"
