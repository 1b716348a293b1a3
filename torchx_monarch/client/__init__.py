# SPDX-License-Identifier: BSD-3-Clause
"""The client API of live allocations: take hosts, execute runs on them, and release them."""
