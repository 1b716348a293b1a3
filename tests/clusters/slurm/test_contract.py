# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The contract of all backends on monarch_slurm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.slurm.apps import Apps
from tests.clusters.slurm.place import SlurmPlace
from tests.contract.contract import Contract


class TestContract(Contract):
    kind = SlurmPlace

    @pytest.fixture
    def place(self, apps: Apps, tmp_path: Path) -> Iterator[SlurmPlace]:
        place = SlurmPlace(apps, tmp_path)
        yield place
        place.close()
