# SPDX-License-Identifier: BSD-3-Clause
"""The contract of all backends on monarch_local."""

from __future__ import annotations

from tests.contract.contract import QueueContract
from tests.local.place import LocalPlace


class TestContract(QueueContract):
    kind = LocalPlace
