# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Read the run options that a subclass of TorchX's ``StructuredOpts`` describes."""

from __future__ import annotations

import copy

from torchx.schedulers.api import StructuredOpts
from torchx.specs import runopts

_known: dict[object, runopts] = {}


def run_options(kind: type[StructuredOpts]) -> runopts:
    """Return a copy of ``kind.as_runopts()``.

    The result is cached: the method parses the source text of the class, and one submission calls it a dozen times.
    """
    if kind not in _known:
        _known[kind] = kind.as_runopts()
    return copy.deepcopy(_known[kind])
