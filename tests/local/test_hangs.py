# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ranks that wait in a collective for one that does not call it: which one is named, and what is done about it."""
