# SPDX-License-Identifier: BSD-3-Clause
"""Synchronise a workspace with the hosts of a live allocation.

The client scans its workspace (``ignores``, ``scan``) into a ``manifest``, and sends the missing files as an
``archive`` to replica 0, which distributes it to all hosts (``host.code_distribution``). Each host stores the files
(``code_store``) and checks them out into the folder of a run (``work_folder``).
"""
