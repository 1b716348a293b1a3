# SPDX-License-Identifier: BSD-3-Clause
"""Run apps as jobs of Slurm: one step per role, one task per node (on the base ``backends.batch``)."""
