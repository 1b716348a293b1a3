# SPDX-License-Identifier: BSD-3-Clause
"""The contract of all backends on monarch_docker."""

from __future__ import annotations

import pytest

from tests.clusters.docker.apps import Apps
from tests.contract.contract import Contract

pytestmark = [pytest.mark.slow]


class TestContract(Contract):
    kind = Apps
    made_by = "apps"
