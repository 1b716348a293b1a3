# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The operating system: processes, files that other users or ranks may have changed, and lines of text output."""
