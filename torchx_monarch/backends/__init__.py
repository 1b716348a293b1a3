# SPDX-License-Identifier: BSD-3-Clause
"""The backends, one package for each, and ``core``, which they share."""
