# SPDX-License-Identifier: BSD-3-Clause
"""Parse the commands of roles (``command``, ``torchrun_options``) and rewrite them (``rewrite``, ``shell``).

All functions are pure: they do no I/O, and import neither torch nor Monarch.
"""
