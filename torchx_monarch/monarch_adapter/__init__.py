# SPDX-License-Identifier: BSD-3-Clause
"""The adapter to Monarch: all uses of Monarch's unstable names, and the guard of its sockets."""
