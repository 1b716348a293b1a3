# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ordinary torchrun-style PyTorch programs on Monarch host meshes, on every backend TorchX can reach."""

from __future__ import annotations

__version__ = "0.1.0"
