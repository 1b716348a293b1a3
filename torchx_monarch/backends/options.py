# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The run options of a class of TorchX's ``StructuredOpts``, which schedulers are asked for a dozen times a submission."""

from __future__ import annotations

import copy
import functools

from torchx.schedulers.api import StructuredOpts
from torchx.specs import runopts


def run_options(kind: type[StructuredOpts]) -> runopts:
    """A copy of ``kind.as_runopts()``, which takes milliseconds: it parses the source text of the class for the help."""
    return copy.deepcopy(_parsed(kind))


@functools.cache
def _parsed(kind: type[StructuredOpts]) -> runopts:
    return kind.as_runopts()
