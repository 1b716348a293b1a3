# SPDX-License-Identifier: BSD-3-Clause
"""The base of backends for batch systems whose nodes share a folder with the submitting machine, and Grid Engine."""
