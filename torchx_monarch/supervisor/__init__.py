# SPDX-License-Identifier: BSD-3-Clause
"""Keep one replica's process: start, restart and end it, write its output into log files, and read them.

Used by the local supervisor and by the tasks of batch systems. Standard library only.
"""
