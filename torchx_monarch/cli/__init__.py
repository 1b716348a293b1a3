# SPDX-License-Identifier: BSD-3-Clause
"""The ``torchx monarch`` command; one module for each of its sub-commands."""
