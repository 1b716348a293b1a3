# SPDX-License-Identifier: BSD-3-Clause
"""Synchronise a workspace with the hosts of a live allocation."""
