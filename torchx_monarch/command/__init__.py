# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a role's command means (command, torchrun_options), and what it becomes (rewrite, shell).

Everything here is a pure function: no I/O, no torch, no monarch, nothing else of this package.
"""
