# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What runs inside a job: the host of each replica, the controller on replica 0, the agents and the ranks."""
