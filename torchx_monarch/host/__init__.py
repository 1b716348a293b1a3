# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The host process of each replica: its ranks, their output, and the workloads that it runs."""
