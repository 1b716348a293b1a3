# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Synchronise a workspace with the hosts of a live allocation.

The client scans its workspace (``ignores``, ``scan``) into a ``manifest``; the ``archive`` of missing files is sent to
replica 0 and distributed to all hosts (``distribution``), which store it (``code_store``) and check it out into the
folder of a run (``work_folder``).
"""
