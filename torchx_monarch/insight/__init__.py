# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a job reports of itself: events, progress lines, and the log of each run."""
