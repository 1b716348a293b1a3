# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""TorchX schedulers: those of this package, and adapted ones of TorchX."""
