# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ordinary torchrun-style PyTorch programs on Monarch host meshes, on every backend TorchX can reach."""

from __future__ import annotations

__version__ = "0.1.0"

_LAZY = {
    "MonarchJob": "torchx_monarch.client.monarch_job",
    "this_job": "torchx_monarch.client.this_job",
}
"""Where what is not imported until it is asked for comes from: the submit side needs neither Monarch nor torch."""

__all__ = [*_LAZY, "__version__"]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
