# SPDX-License-Identifier: BSD-3-Clause
"""Synchronise a workspace with the hosts of a live allocation.

The client scans its workspace (``ignores``, ``scan``) into a ``manifest``, and sends the missing files to replica 0,
from which the other hosts get them (``host.code_distribution``). Each host stores the files (``code_store``) and checks
them out into the folder of a run (``work_folder``).
"""
