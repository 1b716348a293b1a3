# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""TorchX schedulers that are ours, or that mend TorchX's own."""
