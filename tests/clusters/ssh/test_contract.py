# SPDX-License-Identifier: BSD-3-Clause
"""The contract of all backends on monarch_ssh."""

from __future__ import annotations

import pytest

from tests.clusters.ssh.apps import Apps
from tests.contract.contract import QueueContract

pytestmark = [pytest.mark.slow]


class TestContract(QueueContract):
    kind = Apps
    made_by = "apps"
