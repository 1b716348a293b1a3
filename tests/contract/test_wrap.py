# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The contract of all backends on TorchX's own schedulers, wrapped, and what is said where one of them cannot do it."""

from __future__ import annotations

from tests.contract.contract import Contract
from tests.contract.wrapped import LocalCwdPlace, MinimalPlace


class TestLocalCwd(Contract):
    kind = LocalCwdPlace


class TestMinimal(Contract):
    kind = MinimalPlace
