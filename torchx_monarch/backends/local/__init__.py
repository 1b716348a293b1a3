# SPDX-License-Identifier: BSD-3-Clause
"""Run jobs on this machine that outlive the command, the shell and the terminal that started them.

The modules of the app's supervisor (``supervisor``, ``supervisor_loop``), and the modules that they share with the
submit side, import the standard library only.
"""
