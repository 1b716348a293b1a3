# SPDX-License-Identifier: BSD-3-Clause
"""Reports about a job: events, progress lines, and the log of each run."""
