# SPDX-License-Identifier: BSD-3-Clause
"""The host process of a replica: its ranks, their output, and its workload (ranks, a command or actors)."""
