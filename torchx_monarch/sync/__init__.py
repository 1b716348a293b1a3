# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Bringing a workspace to the hosts of a live allocation: what it consists of, what they lack, and their copies of it.

Both sides share it: the client scans (``ignores``, ``scan``), the hosts keep (``store``, ``folder``), and ``tree`` and
``pack`` are what passes between them.
"""
