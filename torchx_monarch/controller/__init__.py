# SPDX-License-Identifier: BSD-3-Clause
"""The controller on replica 0 of a role. It gathers hosts, runs attempts and sessions, and decides how a job ends."""
