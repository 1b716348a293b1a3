# SPDX-License-Identifier: BSD-3-Clause
"""What the program of a rank calls so that a failure costs no work. Standard library only: every rank imports it."""
