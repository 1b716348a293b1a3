# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The user's side of a live allocation: taking one, running on it, giving it back."""
