# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The adapter to Monarch: every name of Monarch that is used, and the guard of its sockets."""
