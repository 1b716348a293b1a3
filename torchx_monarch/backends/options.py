# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The run options that a class of TorchX's ``StructuredOpts`` describes."""

from __future__ import annotations

import copy

from torchx.schedulers.api import StructuredOpts
from torchx.specs import runopts

_known: dict[object, runopts] = {}


def run_options(kind: type[StructuredOpts]) -> runopts:
    """As ``kind.as_runopts()``, which parses the class's source text, and is wanted a dozen times a submission."""
    if kind not in _known:
        _known[kind] = kind.as_runopts()
    return copy.deepcopy(_known[kind])
